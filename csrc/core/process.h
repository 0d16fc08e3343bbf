#pragma once

#include <cstdint>
#include <mutex>

namespace torchkv {

// The number of forks between the first process and this one. A store remembers
// it: a lock that another thread held at the fork stays locked in the child for
// ever, so a child must not touch any. (getpid would be a system call in every
// push.)
uint64_t fork_count();

// The mutex of what all stores of a process share. No fork happens while it is
// held, so a child finds it free. Nothing else is locked while it is held.
std::mutex& process_mutex();

} // namespace torchkv
