#include "byte_counts.h"

namespace torchkv::dist {

ByteCounts& byte_counts() {
  static ByteCounts counts;
  return counts;
}

std::map<std::string, int64_t> snapshot_of_byte_counts() {
  const ByteCounts& counts = byte_counts();
  return {
      {"summed", counts.summed},
      {"listed", counts.listed},
      {"named", counts.named},
      {"sent", counts.sent},
      {"joined", counts.joined},
      {"allocated", counts.allocated},
      {"written", counts.written},
      {"in_pass", counts.in_pass}};
}

} // namespace torchkv::dist
