#include "pushed_codes.h"

#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include "../core/compressed.h"
#include "../kernels/cpu/packed_codes.h"

namespace torchkv::dist {
namespace {

kernels::cpu::PackedCodes codes_in(const Blob& bytes, int64_t num_elements) {
  return {
      reinterpret_cast<const char*>(bytes.data()),
      static_cast<int64_t>(bytes.size()),
      num_elements};
}

} // namespace

void join_codes(Round& round, const Buffers& buffers) {
  for (auto& push : round.pushes) {
    if (!push.is_encoded) {
      continue;
    }
    if (push.pieces.size() > 1) {
      push.pieces = {blob_of(joined_codes(push.pieces, buffers))};
    }
    codes_in(push.pieces[0], round.num_elements);
  }
}

bool can_join_codes(Round& round, const Buffers& buffers) {
  try {
    join_codes(round, buffers);
  } catch (const c10::ValueError&) {
    return false;
  }
  return true;
}

void append_codes(
    const Push& push,
    int64_t num_elements,
    c10::IntArrayRef sizes,
    Tensors& values) {
  const Blob& bytes = push.pieces[0];
  auto encoding = std::make_shared<Packed>();
  encoding->sizes = sizes;
  encoding->dtype = codes_in(bytes, num_elements).dtype();
  const auto size = static_cast<int64_t>(bytes.size());
  values.append(
      tensor_of(push.pieces, size, c10::kByte, Buffers()), std::move(encoding));
}

} // namespace torchkv::dist
