// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>

namespace farm {

// A thread that acts while the one that works is stuck in a backend: it ends a run that takes too long, and
// the process when the reader of its answers is gone. Never destroyed: it runs until the process ends.
class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  // `answers` is a descriptor whose reader is watched, or -1. Throws std::system_error without resources.
  static Watchdog* start(int answers);

  // `expire` is called in the watchdog's thread at `deadline`, unless `disarm` came before. It ends the
  // process, or returns when the run ended by itself at that moment.
  void arm(Clock::time_point deadline, std::function<void()> expire);
  void disarm();

  // The reader may go now.
  void stop_watching_reader();

 private:
  explicit Watchdog(int answers);
  void run();
  void look_at_reader(short events);
  void expire_if_due();
  std::optional<Clock::time_point> next_wake();

  const int answers_;
  int wake_ = -1;
  std::mutex mutex_;
  bool watches_reader_;
  bool armed_ = false;
  Clock::time_point deadline_;
  std::optional<Clock::time_point> sleeps_until_;
  std::function<void()> expire_;
};

}  // namespace farm
