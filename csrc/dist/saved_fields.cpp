#include "saved_fields.h"

#include <string>
#include <utility>
#include <vector>

#include "buffers.h"

namespace torchkv::dist {
namespace {

// What a key is, in the form of before there were row-sparse ones.
enum class KeyForm : uint8_t { kDense, kWhole, kRowSparse, kWholeRowSparse };

KeyForm form_of(const KeySpec& spec) {
  if (spec.is_row_sparse()) {
    return spec.whole ? KeyForm::kWholeRowSparse : KeyForm::kRowSparse;
  }
  return spec.whole ? KeyForm::kWhole : KeyForm::kDense;
}

} // namespace

void write_row_init(ByteWriter& out, const RowInit& init) {
  out.add(static_cast<uint8_t>(init.id));
  for (const double number : {init.mean, init.std, init.low, init.high}) {
    out.add(number);
  }
  out.add(init.seed);
}

RowInit read_row_init(ByteReader& in) {
  RowInit init;
  const auto id = in.number<uint8_t>();
  in.check(id <= static_cast<uint8_t>(RowInit::Id::kUniform));
  init.id = static_cast<RowInit::Id>(id);
  for (double* const number : {&init.mean, &init.std, &init.low, &init.high}) {
    *number = in.number<double>();
  }
  init.seed = in.number<int64_t>();
  return init;
}

void write_state(ByteWriter& out, const KeyState& state) {
  out.add(state.step);
  out.add(state.num_accumulated);
  out.add(static_cast<uint64_t>(state.tensors.size()));
  for (const auto& [name, tensor] : state.tensors) {
    out.add(std::string_view(name));
    out.add(static_cast<int32_t>(tensor.scalar_type()));
    out.add(static_cast<uint64_t>(tensor.dim()));
    for (const int64_t size : tensor.sizes()) {
      out.add(size);
    }
    out.add({blob_of(tensor.contiguous())});
  }
}

KeyState read_state(ByteReader& in) {
  const Buffers buffers;
  KeyState state;
  state.step = in.number<int64_t>();
  state.num_accumulated = in.number<int64_t>();
  for (uint64_t i = in.count(); i > 0; --i) {
    const std::string name(in.text());
    const auto dtype = static_cast<c10::ScalarType>(in.number<int32_t>());
    std::vector<int64_t> sizes;
    for (uint64_t j = in.count(); j > 0; --j) {
      sizes.push_back(in.number<int64_t>());
    }
    state.tensors[name] = tensor_of({in.blob()}, sizes, dtype, buffers).clone();
  }
  return state;
}

void write_spec(ByteWriter& out, const KeySpec& spec) {
  out.add(spec.total);
  out.add(spec.dtype);
  out.add(spec.item_bytes);
  out.add(static_cast<uint8_t>(form_of(spec)));
  out.add(static_cast<uint64_t>(spec.sizes.size()));
  for (const int64_t size : spec.sizes) {
    out.add(size);
  }
  if (spec.is_row_sparse()) {
    write_row_init(out, *spec.row_init);
  }
}

KeySpec read_spec(ByteReader& in) {
  KeySpec spec;
  spec.total = in.number<int64_t>();
  spec.dtype = in.number<int32_t>();
  spec.item_bytes = in.number<int32_t>();
  const auto number = in.number<uint8_t>();
  in.check(number <= static_cast<uint8_t>(KeyForm::kWholeRowSparse));
  const auto form = static_cast<KeyForm>(number);
  spec.whole = form == KeyForm::kWhole || form == KeyForm::kWholeRowSparse;
  for (uint64_t i = in.count(); i > 0; --i) {
    spec.sizes.push_back(in.number<int64_t>());
  }
  if (form == KeyForm::kRowSparse || form == KeyForm::kWholeRowSparse) {
    in.check(!spec.sizes.empty());
    spec.row_init = read_row_init(in);
  }
  return spec;
}

} // namespace torchkv::dist
