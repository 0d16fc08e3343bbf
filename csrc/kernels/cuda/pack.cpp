#include "pack.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../../core/step_rate.h"
#include "rate_thread.h"

namespace torchkv::kernels::cuda {
namespace {

size_t element_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kInt8:
      return 1;
    case Dtype::kHalf:
    case Dtype::kBFloat16:
    case Dtype::kInt16:
      return 2;
    case Dtype::kFloat:
    case Dtype::kInt32:
      return 4;
    default:
      return 8;
  }
}

constexpr size_t key_bytes(size_t num_pointers) {
  return sizeof(KeyHead) + num_pointers * sizeof(void*);
}

constexpr size_t bank_bytes(size_t params_bytes) {
  return params_bytes - offsetof(Params<kSmallParams>, bank);
}

size_t step_bytes(const Variant& variant) {
  return !has_step(variant.rule)         ? 0
      : variant.stored == Dtype::kDouble ? sizeof(Step<double>)
                                         : sizeof(Step<float>);
}

// The kernel for this number of values if there is one, else that for any.
Variant variant_of(const SumJob& job) {
  Variant variant{
      job.value,
      job.stored_dtype,
      rule_of(job.step->rule.id),
      static_cast<uint8_t>(std::min<size_t>(job.num_values, UINT8_MAX))};
  if (job.first_is_sum || !is_built(variant)) {
    variant.num_values = 0;
  }
  return variant;
}

Variant variant_of_norm(const SumJob& job) {
  const bool is_one = job.num_values == 1 && !job.first_is_sum;
  return {job.value, job.value, Rule::kNorm, static_cast<uint8_t>(is_one)};
}

// Of a launch for any number of values.
Variant variant_with(const SumJob& job, Rule rule) {
  return {job.value, job.stored_dtype, rule, 0};
}

bool is_copy(const SumJob& job) {
  return job.step->rule.id == RuleSpec::Id::kAssign && job.num_values == 1 &&
      job.value == job.stored_dtype && !job.first_is_sum;
}

uintptr_t address(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

} // namespace

// The keys of one launch.
struct Launches::Packed {
  Packed(Kind kind_, const Variant& variant_, size_t num_pointers_)
      : kind(kind_),
        variant(variant_),
        num_pointers(num_pointers_),
        bytes_of_key(key_bytes(num_pointers_)),
        bytes_of_step(
            kind_ == Kind::kRate ? sizeof(RateStep) : step_bytes(variant_)) {}

  bool is_for(Kind other, const Variant& of, size_t pointers) const {
    return kind == other && num_pointers == pointers &&
        variant.value == of.value && variant.stored == of.stored &&
        variant.rule == of.rule;
  }

  size_t used_bytes() const {
    return num_keys * bytes_of_key + num_steps * bytes_of_step;
  }
  // For another key and another step.
  bool has_room(size_t params_bytes) const {
    return used_bytes() + bytes_of_key + bytes_of_step <=
        bank_bytes(params_bytes);
  }

  // The next key; its pointers follow it.
  KeyHead* next_key() {
    return reinterpret_cast<KeyHead*>(params.bank + num_keys++ * bytes_of_key);
  }

  // The index of the step, which the last few keys may share.
  uint16_t place_of(const RuleStep& step) {
    static_assert(std::is_trivially_copyable_v<RuleStep>);
    const size_t num_recent = std::min<size_t>(num_steps, recent.size());
    for (size_t place = num_steps; place > num_steps - num_recent; --place) {
      // Different padding only adds another step.
      // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
      if (std::memcmp(
              &recent[(place - 1) % recent.size()], &step, sizeof(step)) == 0) {
        return static_cast<uint16_t>(place - 1);
      }
    }
    recent[num_steps++ % recent.size()] = step;
    char* const to =
        params.bank + sizeof(params.bank) - num_steps * bytes_of_step;
    if (kind == Kind::kRate) {
      new (to) RateStep(step);
    } else if (variant.stored == Dtype::kDouble) {
      new (to) Step<double>(step);
    } else {
      new (to) Step<float>(step);
    }
    return static_cast<uint16_t>(num_steps - 1);
  }

  Kind kind;
  Variant variant;
  size_t num_pointers; // of a key
  size_t bytes_of_key;
  size_t bytes_of_step;
  uint32_t num_keys = 0;
  size_t num_steps = 0;
  std::array<RuleStep, 4> recent;
  Params<kLargeParams> params; // uninitialized: zeroing costs more than a key
};

namespace {

bool has_room(const Variant& variant, const SumJob& job) {
  return key_bytes(num_pointers(variant.rule) + job.num_values) +
      step_bytes(variant) <=
      bank_bytes(kSmallParams);
}

} // namespace

bool Launches::supports(const SumJob& job) {
  if (has_norms(job.step->rule)) {
    const Variant variant = variant_with(job, Rule::kMeasure);
    return is_built(variant) && (!job.first_is_sum || is_half(job.value)) &&
        has_room(variant, job);
  }
  const Variant variant = variant_of(job);
  return is_elementwise(job.step->rule) &&
      (is_copy(job) || is_built(variant)) &&
      (!job.first_is_sum || is_half(job.value)) && has_room(variant, job);
}

bool Launches::supports_norm(const SumJob& job) {
  const Variant variant = variant_of_norm(job);
  return is_built(variant) && (!job.first_is_sum || is_half(job.value)) &&
      has_room(variant, job);
}

int64_t Launches::num_squares(const SumJob& job) {
  return (job.num_elements + kNormChunk - 1) / kNormChunk;
}

int64_t Launches::num_numbers(const SumJob& job) {
  constexpr auto kSquares = static_cast<int64_t>(sizeof(Squares) / 8);
  return 1 + kSquares * num_squares(job); // the rate, then the squares
}

Launches::Launches(const Table& table, void* stream, size_t params_limit)
    : table_(table),
      stream_(stream),
      params_limit_(std::min<size_t>(params_limit, table.params_bytes)) {}

Launches::~Launches() = default;

Launches::Packed& Launches::packed(
    Kind kind,
    const Variant& variant,
    size_t num_pointers) {
  // Only the newest of a kind may have room; usually it is that of the last
  // key.
  if (last_ == nullptr || !last_->is_for(kind, variant, num_pointers)) {
    const auto found =
        std::find_if(packed_.rbegin(), packed_.rend(), [&](const auto& packed) {
          return packed->is_for(kind, variant, num_pointers);
        });
    last_ = found == packed_.rend() ? nullptr : found->get();
  }
  if (last_ != nullptr && last_->has_room(params_limit_)) {
    return *last_;
  }
  packed_.push_back(std::make_unique<Packed>(kind, variant, num_pointers));
  last_ = packed_.back().get();
  return *last_;
}

void Launches::add(const SumJob& job) {
  if (job.num_elements == 0) {
    return; // its memory may be null
  }
  if (is_copy(job)) {
    add_copy(
        job.values[0],
        &job.stored,
        1,
        job.num_elements * static_cast<int64_t>(element_size(job.value)));
    return;
  }
  add(job.first_is_sum ? Kind::kSumOnSum : Kind::kSum,
      variant_of(job),
      job,
      job.stored);
}

void Launches::add_norm(const SumJob& job, double scale, double* squares) {
  scale_ = scale;
  if (job.num_elements != 0) {
    add(job.first_is_sum ? Kind::kNormOnSum : Kind::kNorm,
        variant_of_norm(job),
        job,
        squares);
  }
}

void Launches::add_with_norms(const SumJob& job, double* numbers) {
  if (job.num_elements == 0) {
    return;
  }
  const RuleSpec& rule = job.step->rule;
  SumJob measured = job;
  SumJob scaled = job;
  RuleStep elementwise = *job.step;
  if (is_lamb(rule)) {
    scaled.num_values = 0; // the gradient is in the state
    scaled.first_is_sum = false;
  } else {
    measured.states = {};
    elementwise = scaled_by_norms(*job.step, 1, 1); // by any: the rate follows
  }
  scaled.step = &elementwise;
  add(measured.first_is_sum ? Kind::kMeasureOnSum : Kind::kMeasure,
      variant_with(job, Rule::kMeasure),
      measured,
      job.stored,
      numbers + 1);
  add_rate(job, numbers);
  add(scaled.first_is_sum ? Kind::kScaledOnSum : Kind::kScaled,
      variant_with(job, Rule::kScaled),
      scaled,
      job.stored,
      numbers);
}

void Launches::add_rate(const SumJob& job, double* numbers) {
  Packed& launch = packed(Kind::kRate, Variant{}, 1);
  KeyHead* const key = launch.next_key();
  *reinterpret_cast<void**>(key + 1) = numbers + 1;
  key->alignment = 1;
  key->head = 0;
  key->follows_writes = 0;
  key->size = num_squares(job);
  key->memory = numbers;
  key->step = launch.place_of(*job.step);
}

void Launches::add(
    Kind kind,
    const Variant& variant,
    const SumJob& job,
    void* memory,
    double* numbers) {
  const size_t num_own = num_pointers(variant.rule);
  Packed& launch = packed(kind, variant, num_own + job.num_values);
  KeyHead* const key = launch.next_key();
  auto* const pointers = reinterpret_cast<const void**>(key + 1);
  if (num_own != 0) {
    pointers[0] = job.master;
    std::copy_n(job.states.begin(), num_states(variant.rule), pointers + 1);
  }
  std::copy_n(job.values, job.num_values, pointers + num_own);
  uintptr_t any = variant.rule == Rule::kNorm ? 0 : address(memory);
  if (numbers != nullptr) {
    pointers[num_own - 1] = nullptr; // read and written singly
  }
  for (size_t i = 0; i < num_own + job.num_values; ++i) {
    any |= address(pointers[i]);
  }
  if (numbers != nullptr) {
    pointers[num_own - 1] = numbers;
  }
  key->alignment = any % 16 == 0 ? 16 : 1;
  key->head = 0;
  key->follows_writes = job.follows_writes ? 1 : 0;
  key->size = job.num_elements;
  key->memory = memory;
  key->step = has_step(variant.rule) ? launch.place_of(*job.step) : uint16_t{0};
}

void Launches::add_copy(
    const void* source,
    void* const* outs,
    size_t num_outs,
    int64_t num_bytes) {
  // As many outs at a time as the smallest Params has room for.
  constexpr size_t kMaxOuts =
      (bank_bytes(kSmallParams) - key_bytes(0)) / sizeof(void*);
  if (num_bytes == 0) {
    return; // its memory may be null
  }
  for (; num_outs > kMaxOuts; outs += kMaxOuts, num_outs -= kMaxOuts) {
    add_copy(source, outs, kMaxOuts, num_bytes);
  }
  Packed& launch = packed(Kind::kCopy, Variant{}, num_outs);
  KeyHead* const key = launch.next_key();
  std::copy_n(outs, num_outs, reinterpret_cast<void**>(key + 1));
  uintptr_t difference = 16;
  for (size_t i = 0; i < num_outs; ++i) {
    difference |= address(outs[i]) ^ address(source);
  }
  const uintptr_t alignment = difference & -difference;
  const auto head = static_cast<int64_t>(-address(source) & (alignment - 1));
  key->alignment = static_cast<uint8_t>(alignment);
  key->head = static_cast<uint8_t>(std::min(head, num_bytes)) & 0x7FU;
  key->follows_writes = 0;
  key->size = num_bytes;
  key->memory = const_cast<void*>(source); // only read
}

void Launches::launch(Packed& packed) {
  auto& params = packed.params;
  // Steps are at the end of the bank, whatever its size.
  const size_t steps_bytes = packed.num_steps * packed.bytes_of_step;
  size_t params_bytes = kLargeParams;
  for (const size_t smaller : {kMediumParams, kSmallParams}) {
    if (packed.used_bytes() <= bank_bytes(smaller)) {
      params_bytes = smaller;
    }
  }
  std::memmove(
      params.bank + bank_bytes(params_bytes) - steps_bytes,
      params.bank + bank_bytes(kLargeParams) - steps_bytes,
      steps_bytes);

  const bool is_copy = packed.kind == Kind::kCopy;
  const int64_t chunk = is_copy    ? kCopyChunk
      : packed.kind == Kind::kRate ? UINT32_MAX // one for each key
                                   : chunk_of(packed.variant);
  int64_t num_chunks = 0;
  for (uint32_t i = 0; i < packed.num_keys; ++i) {
    auto* const key = reinterpret_cast<KeyHead*>(
        params.bank + i * key_bytes(packed.num_pointers));
    num_chunks += (key->size + chunk - 1) / chunk;
    key->chunk_end = static_cast<uint32_t>(num_chunks);
  }
  params.head.num_keys = packed.num_keys;
  params.head.num_chunks = static_cast<uint32_t>(num_chunks);
  params.head.chunk = static_cast<uint32_t>(chunk);
  params.head.key_bytes = static_cast<uint16_t>(key_bytes(packed.num_pointers));
  params.head.num_values = static_cast<uint16_t>(
      packed.num_pointers - num_pointers(packed.variant.rule));
  params.head.first_is_sum = packed.kind == Kind::kSumOnSum ||
      packed.kind == Kind::kNormOnSum || packed.kind == Kind::kMeasureOnSum ||
      packed.kind == Kind::kScaledOnSum;
  params.head.scale = scale_;

  const Launch launch{&params, params_bytes, stream_};
  error_ = is_copy                 ? table_.launch_copy(launch)
      : packed.kind == Kind::kRate ? table_.launch_rates(launch)
                                   : table_.launch_sum(packed.variant, launch);
}

int Launches::finish() {
  std::sort(packed_.begin(), packed_.end(), [](const auto& a, const auto& b) {
    return a->kind < b->kind;
  });
  for (const auto& packed : packed_) {
    if (error_ == 0) {
      launch(*packed);
    }
  }
  packed_.clear();
  last_ = nullptr;
  return error_;
}

} // namespace torchkv::kernels::cuda
