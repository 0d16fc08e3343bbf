#include "signals.h"

#include <atomic>

namespace torchkv {
namespace {

std::atomic<void (*)()> signal_check{nullptr};

} // namespace

void set_signal_check(void (*check)()) {
  signal_check = check;
}

void check_signals() {
  if (auto* const check = signal_check.load()) {
    check();
  }
}

} // namespace torchkv
