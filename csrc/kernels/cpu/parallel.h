#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

#include "../../core/export.h"

namespace torchkv::kernels::cpu {

// The work of a job: units in any order, each of which moves so many bytes.
struct Work {
  int64_t num_units = 0;
  int64_t bytes_per_unit = 0;
  int64_t cut = 1024; // a job is split at multiples of this many units
};

// Processes all jobs in one parallel region: calls `body(job, begin, end,
// stream)` for spans [begin, end) that cover the units of each job once. Large
// jobs are split, small ones are grouped, and threads take pieces dynamically,
// so that a slow thread does not delay the others. `stream` is true if the jobs
// together move more than the caches hold.
//
// Uses PyTorch's intra-op threads (torch.set_num_threads), and of these only as
// many as concurrent calls leave free. Little work stays on the calling thread,
// where jobs run in order, as does any work within another parallel region or
// in a forked child, where OpenMP would wait for threads of the parent process.
//
// Blocks until done. REQUIRES: `body` does not throw and takes no lock that the
// caller may hold.
TORCHKV_API void parallel_spans(
    int64_t num_jobs,
    c10::function_ref<Work(int64_t job)> work,
    c10::function_ref<
        void(int64_t job, int64_t begin, int64_t end, bool stream)> body);

} // namespace torchkv::kernels::cpu
