#pragma once

#include <cstdint>
#include <mutex>

namespace torchkv {

// The number of forks between the first process and this one. A store records
// it: a lock that another thread held at the fork stays locked in the child,
// which must not use the store. (getpid would be a system call in every push.)
uint64_t fork_count();

// Guards state shared by all stores of a process. No fork happens while it is
// held, so it is free in a child. No other lock is acquired under it.
std::mutex& process_mutex();

} // namespace torchkv
