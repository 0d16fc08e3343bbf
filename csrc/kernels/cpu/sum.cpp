#include "sum.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "../../core/plain_dispatch.h"
#include "cache_line.h"
#include "copy_line.h"
#include "lamb.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {

namespace {

// Sums of squares are added up in chunks of so many elements, whatever the
// threads do.
constexpr int64_t kChunk = int64_t{16} * 1024;

int64_t num_chunks(int64_t num_elements) {
  return (num_elements + kChunk - 1) / kChunk;
}

Work chunks_of(int64_t num_elements, int64_t bytes_per_element) {
  const int64_t size = std::clamp(num_elements, int64_t{1}, kChunk);
  return {num_chunks(num_elements), size * bytes_per_element, /*cut=*/1};
}

char* begin_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<char*>(tensor.mutable_data_ptr())
                          : nullptr;
}

StateLine line_of(const State& state) {
  StateLine line;
  line.master = begin_of(state.master);
  for (size_t i = 0; i < kMaxStates; ++i) {
    line.states[i] = begin_of(state.states[i]);
  }
  return line;
}

void move(StateLine& line, int64_t num_bytes) {
  const auto move = [&](char*& data) {
    data = data == nullptr ? nullptr : data + num_bytes;
  };
  move(line.master);
  std::for_each(line.states.begin(), line.states.end(), move);
}

// By what to multiply fp64 numbers of such a 2-norm before they are squared, so
// that the squares are in fp64's range.
double scale_for(double norm) {
  constexpr double kScale = 0x1p600;
  return norm > 0x1p500 ? 1 / kScale : norm < 0x1p-450 ? kScale : 1;
}

int64_t size_of(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

} // namespace

void SumBatch::add(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    c10::ScalarType accumulation,
    const RuleStep& step,
    const State& state) {
  if (stored.numel() == 0) {
    return; // its memory may be null
  }
  Job job;
  job.num_elements = stored.numel();
  job.dtype = stored.scalar_type();
  job.bytes_per_element = size_of(job.dtype);
  for (const auto& value : values) {
    values_.push_back(static_cast<const char*>(value.data->const_data_ptr()));
    dtypes_.push_back(value.data->scalar_type());
    job.bytes_per_element += size_of(dtypes_.back());
  }
  job.values_end = values_.size();
  job.stored = static_cast<char*>(stored.mutable_data_ptr());
  job.accumulation = accumulation;
  job.step = &step;
  if (step.rule.id != RuleSpec::Id::kAssign) {
    job.state = cpu::line_of(state);
    for (const auto& tensor : state.states) {
      job.bytes_per_element +=
          tensor.defined() ? 2 * size_of(tensor.scalar_type()) : 0;
    }
  }
  jobs_.push_back(job);
}

SumLine SumBatch::line_of(size_t i) const {
  const Job& job = jobs_[i];
  const size_t first = i == 0 ? 0 : jobs_[i - 1].values_end;
  return {
      {dtypes_.data() + first, job.values_end - first},
      job.dtype,
      job.accumulation,
      *job.step,
      SumLine::Layout::kDense};
}

c10::SmallVector<const char*, 8> SumBatch::values_of(size_t i, int64_t begin)
    const {
  c10::SmallVector<const char*, 8> values;
  for (size_t k = i == 0 ? 0 : jobs_[i - 1].values_end; k < jobs_[i].values_end;
       ++k) {
    values.push_back(values_[k] + begin * size_of(dtypes_[k]));
  }
  return values;
}

StateLine SumBatch::state_of(size_t i, int64_t begin) const {
  const Job& job = jobs_[i];
  StateLine state = job.state;
  if (job.step->rule.id != RuleSpec::Id::kAssign) { // which takes any dtype
    move(state, begin * size_of(at::toOpMathType(job.dtype)));
  }
  return state;
}

void SumBatch::run() const {
  bool has_lamb = false;
  for (const auto& job : jobs_) {
    has_lamb = has_lamb || job.step->rule.id == RuleSpec::Id::kLamb;
  }
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        return Work{jobs_[i].num_elements, jobs_[i].bytes_per_element};
      },
      [&](int64_t i, int64_t begin, int64_t end, bool stream) {
        const Job& job = jobs_[i];
        line_of(i).dense(
            values_of(i, begin).data(),
            job.stored + begin * size_of(job.dtype),
            state_of(i, begin),
            end - begin,
            stream);
        if (stream) {
          end_stream();
        }
      });
  if (has_lamb) {
    run_lamb();
  }
}

double SumBatch::squared_norm(double scale) const {
  std::vector<int64_t> first_chunk{0};
  for (const auto& job : jobs_) {
    first_chunk.push_back(first_chunk.back() + num_chunks(job.num_elements));
  }
  std::vector<double> sums(first_chunk.back());
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        return chunks_of(jobs_[i].num_elements, jobs_[i].bytes_per_element);
      },
      [&](int64_t i, int64_t begin, int64_t end, bool /*stream*/) {
        const SumLine line = line_of(i);
        for (int64_t chunk = begin; chunk < end; ++chunk) {
          const int64_t first = chunk * kChunk;
          sums[first_chunk[i] + chunk] = line.squared_norm(
              values_of(i, first).data(),
              std::min(kChunk, jobs_[i].num_elements - first),
              scale);
        }
      });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// The second half of LAMB: the norms of weights and directions, then the steps.
void SumBatch::run_lamb() const {
  std::vector<int64_t> first_chunk{0};
  const auto lamb_of = [&](int64_t i, int64_t first_element) {
    const Job& job = jobs_[i];
    return LambLine(
        *job.step,
        job.dtype,
        job.stored + first_element * size_of(job.dtype),
        state_of(i, first_element));
  };
  std::vector<int64_t> num_elements; // still to be worked on
  for (const auto& job : jobs_) {
    const bool is_lamb = job.step->rule.id == RuleSpec::Id::kLamb;
    num_elements.push_back(is_lamb ? job.num_elements : 0);
    first_chunk.push_back(first_chunk.back() + num_chunks(num_elements.back()));
  }
  const auto for_each_chunk = [&](auto body) {
    parallel_spans(
        static_cast<int64_t>(jobs_.size()),
        [&](int64_t i) {
          return chunks_of(num_elements[i], jobs_[i].bytes_per_element);
        },
        [&](int64_t i, int64_t begin, int64_t end, bool /*stream*/) {
          for (int64_t chunk = begin; chunk < end; ++chunk) {
            const int64_t first = chunk * kChunk;
            body(
                i,
                chunk,
                lamb_of(i, first),
                std::min(kChunk, jobs_[i].num_elements - first));
          }
        });
  };
  std::vector<LambLine::Norms> chunks(first_chunk.back());
  std::vector<LambLine::Norms> scales(jobs_.size(), {1, 1});
  std::vector<LambLine::Norms> norms(jobs_.size());
  const auto find_norms = [&] {
    for_each_chunk(
        [&](int64_t i, int64_t chunk, const LambLine& line, int64_t size) {
          chunks[first_chunk[i] + chunk] = line.squared_norms(size, scales[i]);
        });
    for (size_t i = 0; i < jobs_.size(); ++i) {
      LambLine::Norms sum;
      for (int64_t chunk = first_chunk[i]; chunk < first_chunk[i + 1];
           ++chunk) {
        sum.weight += chunks[chunk].weight;
        sum.direction += chunks[chunk].direction;
      }
      norms[i] = {
          std::sqrt(sum.weight) / scales[i].weight,
          std::sqrt(sum.direction) / scales[i].direction};
    }
  };
  find_norms();
  const auto all_elements = num_elements;
  bool is_again = false;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (c10::toRealValueType(jobs_[i].dtype) == c10::kDouble) {
      scales[i] = {scale_for(norms[i].weight), scale_for(norms[i].direction)};
    }
    const bool is_right = scales[i].weight == 1 && scales[i].direction == 1;
    num_elements[i] = is_right ? 0 : num_elements[i];
    is_again = is_again || num_elements[i] != 0;
  }
  if (is_again) {
    find_norms();
  }
  num_elements = all_elements;
  for_each_chunk(
      [&](int64_t i, int64_t /*chunk*/, const LambLine& line, int64_t size) {
        line.move(norms[i].trust(), size);
      });
}

namespace {

// A tile of a plane: this many elements of each of so many lines.
constexpr int64_t kTileElements = 64;
constexpr int64_t kTileLines = 16;

// tile[line][i] = the plane's element i of a line.
template <typename T>
void turn(
    const char* source,
    int64_t element_stride,
    int64_t line_stride,
    int64_t num_elements,
    int64_t num_lines,
    char* tile) {
  for (int64_t i = 0; i < num_elements; ++i) {
    for (int64_t line = 0; line < num_lines; ++line) {
      std::memcpy(
          tile + (line * kTileElements + i) * static_cast<int64_t>(sizeof(T)),
          source + i * element_stride + line * line_stride,
          sizeof(T));
    }
  }
}

struct Complex128 {
  double real;
  double imag;
};

// By the size of an element.
decltype(&turn<uint8_t>) turn_of(int64_t element_size) {
  switch (element_size) {
    case 1:
      return &turn<uint8_t>;
    case 2:
      return &turn<uint16_t>;
    case 4:
      return &turn<uint32_t>;
    case 8:
      return &turn<uint64_t>;
    default:
      return &turn<Complex128>;
  }
}

// A plane of lines, as PyTorch's iterator finds it: the stored value first,
// then the values. `strides` has those between the elements of a line, then
// those between lines.
//
// A value that lies across the stored one (a channels_last gradient of a
// contiguous weight) would be read one element of a cache line at a time, so it
// is turned first, tile by tile.
class SumPlane {
 public:
  SumPlane(
      c10::ArrayRef<Value> values,
      const at::Tensor& stored,
      c10::ScalarType accumulation,
      const RuleStep& step,
      const State& state)
      : num_values_(values.size()),
        line_(
            dtypes_of(values),
            stored.scalar_type(),
            accumulation,
            step,
            SumLine::Layout::kAny) {
    for (const auto& value : values) {
      sizes_.push_back(static_cast<int64_t>(value.data->element_size()));
    }
    if (step.rule.id != RuleSpec::Id::kAssign) {
      state_ = line_of(state);
      first_stored_ = static_cast<const char*>(stored.const_data_ptr());
      stored_size_ = size_of(stored.scalar_type());
      state_size_ = size_of(at::toOpMathType(stored.scalar_type()));
    }
  }

  void operator()(
      char** data,
      const int64_t* strides,
      int64_t num_elements,
      int64_t num_lines) const {
    const int64_t* line_strides = strides + num_values_ + 1;
    c10::SmallVector<bool, 8> across;
    for (size_t k = 1; k <= num_values_; ++k) {
      across.push_back(
          num_elements > 1 && num_lines > 1 && line_strides[k] != 0 &&
          std::abs(line_strides[k]) < std::abs(strides[k]));
    }
    const bool any_across =
        std::find(across.begin(), across.end(), true) != across.end();
    // Without tiles, whole lines.
    const int64_t tile_elements = any_across ? kTileElements : num_elements;
    const int64_t tile_lines = any_across ? kTileLines : num_lines;
    for (int64_t line = 0; line < num_lines; line += tile_lines) {
      for (int64_t i = 0; i < num_elements; i += tile_elements) {
        sum_tile(
            data,
            strides,
            across,
            i,
            line,
            std::min(tile_elements, num_elements - i),
            std::min(tile_lines, num_lines - line));
      }
    }
  }

 private:
  static c10::SmallVector<c10::ScalarType, 8> dtypes_of(
      c10::ArrayRef<Value> values) {
    c10::SmallVector<c10::ScalarType, 8> dtypes;
    for (const auto& value : values) {
      dtypes.push_back(value.data->scalar_type());
    }
    return dtypes;
  }

  void sum_tile(
      char** data,
      const int64_t* strides,
      c10::ArrayRef<bool> across,
      int64_t first_element,
      int64_t first_line,
      int64_t num_elements,
      int64_t num_lines) const {
    const int64_t* line_strides = strides + num_values_ + 1;
    const auto at = [&](size_t k) {
      return data[k] + first_element * strides[k] +
          first_line * line_strides[k];
    };
    c10::SmallVector<const char*, 8> values;
    c10::SmallVector<int64_t, 8> element_steps;
    c10::SmallVector<int64_t, 8> line_steps;
    c10::SmallVector<char, 0> tiles;
    int64_t tiles_size = 0;
    for (size_t k = 0; k < num_values_; ++k) {
      tiles_size += across[k] ? tile_size(k) : 0;
    }
    tiles.resize(tiles_size);
    char* tile = tiles.data();
    for (size_t k = 0; k < num_values_; ++k) {
      if (across[k]) {
        turn_of(sizes_[k])(
            at(k + 1),
            strides[k + 1],
            line_strides[k + 1],
            num_elements,
            num_lines,
            tile);
        values.push_back(tile);
        element_steps.push_back(sizes_[k]);
        line_steps.push_back(kTileElements * sizes_[k]);
        tile += tile_size(k);
      } else {
        values.push_back(at(k + 1));
        element_steps.push_back(strides[k + 1]);
        line_steps.push_back(line_strides[k + 1]);
      }
    }
    char* stored = at(0);
    for (int64_t line = 0; line < num_lines; ++line) {
      StateLine state = state_; // lies as the stored value does
      if (first_stored_ != nullptr) {
        move(state, (stored - first_stored_) / stored_size_ * state_size_);
      }
      line_.strided(
          values.data(),
          element_steps.data(),
          stored,
          strides[0],
          state,
          num_elements);
      for (size_t k = 0; k < num_values_; ++k) {
        values[k] += line_steps[k];
      }
      stored += line_strides[0];
    }
  }

  int64_t tile_size(size_t k) const {
    return kTileElements * kTileLines * sizes_[k];
  }

  const size_t num_values_;
  const SumLine line_;
  c10::SmallVector<int64_t, 8> sizes_;
  StateLine state_;
  const char* first_stored_ = nullptr;
  int64_t stored_size_ = 1;
  int64_t state_size_ = 0;
};

} // namespace

void sum_strided(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    c10::ScalarType accumulation,
    const RuleStep& step,
    const State& state) {
  if (stored.numel() == 0) {
    return;
  }
  const PlainDispatch plain; // for the views that the iterator makes
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false)
      .check_all_same_dtype(false)
      .resize_outputs(false)
      .add_output(stored);
  for (const auto& value : values) {
    config.add_const_input(*value.data);
  }
  auto iterator = config.build();
  const SumPlane plane(values, stored, accumulation, step, state);
  const auto sum = [&](char** data,
                       const int64_t* strides,
                       int64_t size,
                       int64_t num_lines) {
    plane(data, strides, size, num_lines);
  };
  if (may_use_threads()) {
    iterator.for_each(sum);
  } else {
    iterator.serial_for_each(sum, {0, iterator.numel()});
  }
}

void CopyBatch::add(const at::Tensor& source, const at::Tensor& out) {
  if (source.numel() == 0) {
    return; // its memory may be null
  }
  const auto* data = static_cast<const char*>(source.const_data_ptr());
  if (jobs_.empty() || jobs_.back().source != data) {
    jobs_.push_back({data, static_cast<int64_t>(source.nbytes()), 0});
  }
  outs_.push_back(static_cast<char*>(out.mutable_data_ptr()));
  jobs_.back().outs_end = outs_.size();
}

void CopyBatch::run() const {
  const auto outs_begin = [&](int64_t i) {
    return i == 0 ? 0 : jobs_[i - 1].outs_end;
  };
  parallel_spans(
      static_cast<int64_t>(jobs_.size()),
      [&](int64_t i) {
        const auto num_outs =
            static_cast<int64_t>(jobs_[i].outs_end - outs_begin(i));
        return Work{jobs_[i].num_bytes, 1 + num_outs};
      },
      [&](int64_t i, int64_t begin, int64_t end, bool stream) {
        const Job& job = jobs_[i];
        c10::SmallVector<char*, 8> outs(
            outs_.begin() + static_cast<int64_t>(outs_begin(i)),
            outs_.begin() + static_cast<int64_t>(job.outs_end));
        for (auto& out : outs) {
          out += begin;
        }
        copy_line(job.source + begin, outs, end - begin, stream);
        if (stream) {
          end_stream();
        }
      });
}

bool lie_alike(
    c10::IntArrayRef sizes,
    c10::IntArrayRef a_strides,
    c10::IntArrayRef b_strides) {
  if (a_strides == b_strides) {
    return true;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    // The stride of a dimension of one element takes nobody anywhere.
    if (sizes[i] != 1 && a_strides[i] != b_strides[i]) {
      return false;
    }
  }
  return true;
}

} // namespace torchkv::kernels::cpu
