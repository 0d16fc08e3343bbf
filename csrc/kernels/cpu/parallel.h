#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

#include "../../core/export.h"

namespace torchkv::kernels::cpu {

// A job's work: units that can be done in any order, each moving so many bytes.
struct Work {
  int64_t num_units = 0;
  int64_t bytes_per_unit = 0;
  int64_t cut = 1024; // units; a job is cut at multiples of them
};

// Whether the calling thread may start a parallel region: it is in none, and
// the process is no forked child, whose OpenMP would wait for the threads of
// its parent.
bool may_use_threads();

// Does all units of all jobs in one parallel region: runs
// `body(job, begin, end, stream)` over spans [begin, end) that cover each job's
// units once. A large job is cut, small ones go
// together, and threads take the pieces as they get done, so one that is held
// up does not hold up the rest. `stream` says that the jobs together move more
// than the caches hold.
//
// Takes PyTorch's intra-op threads (torch.set_num_threads), and of these only
// as many as concurrent calls leave free: callers in several threads of the
// user's do not multiply them. Where it may use no threads, and for little
// work, it stays on the calling thread, where jobs run in order.
//
// Blocks until done. REQUIRES: `body` does not throw and takes no lock that the
// caller may hold.
TORCHKV_API void parallel_spans(
    int64_t num_jobs,
    c10::function_ref<Work(int64_t job)> work,
    c10::function_ref<
        void(int64_t job, int64_t begin, int64_t end, bool stream)> body);

} // namespace torchkv::kernels::cpu
