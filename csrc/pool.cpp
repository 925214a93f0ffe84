#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace edgexpert {
namespace {

thread_local int current_thread = -1;  // number of the thread while it runs a task

using Clock = std::chrono::steady_clock;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int threads) : size_(threads) {
    // A spinning thread may only take a core that nobody else of us needs.
    spin_ = threads <= static_cast<int>(std::thread::hardware_concurrency()) ? std::chrono::microseconds(2000)
                                                                            : std::chrono::microseconds(0);
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    stop_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  void run(std::int64_t tasks, void (*body)(void*, std::int64_t, int), void* context) {
    failure_ = nullptr;
    failed_.store(false, std::memory_order_relaxed);
    body_ = body;
    context_ = context;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<std::uint64_t>(tasks) << 32, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    claim(0);
    const auto begin = Clock::now();
    for (std::uint32_t done; (done = done_.load(std::memory_order_acquire)) != static_cast<std::uint32_t>(tasks);) {
      if (Clock::now() - begin < spin_) {
        pause();
      } else {
        done_.wait(done, std::memory_order_acquire);
      }
    }
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  // The ticket holds the number of tasks and the next one. Who claims a task keeps its job alive until the task is done, so
  // body_ and context_ are read after the claim; a late thread that claims a task of a newer job simply helps with that.
  void claim(int thread) {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (static_cast<std::uint32_t>(ticket) < ticket >> 32) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      const int outer = std::exchange(current_thread, thread);
      try {
        body_(context_, static_cast<std::uint32_t>(ticket), thread);
      } catch (...) {
        if (!failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
      }
      current_thread = outer;
      const std::uint32_t tasks = ticket >> 32;
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) done_.notify_one();
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work(int thread) {
    std::uint32_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
      const auto begin = Clock::now();
      while (epoch_.load(std::memory_order_acquire) == seen) {
        if (Clock::now() - begin < spin_) {
          for (int i = 0; i < 16; ++i) pause();
        } else {
          epoch_.wait(seen, std::memory_order_acquire);
        }
      }
      seen = epoch_.load(std::memory_order_acquire);
      claim(thread);
    }
  }

  const int size_;
  std::chrono::microseconds spin_;
  void (*body_)(void*, std::int64_t, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<std::uint32_t> done_{0};
  alignas(64) std::atomic<std::uint32_t> epoch_{0};
  std::atomic<bool> stop_{false}, failed_{false};
  std::exception_ptr failure_;  // of the task that set failed_; read when all tasks are done
  std::vector<std::thread> workers_;
};

// Leaked on purpose: at exit the threads may already be gone, and joining them would hang.
Pool*& pool() {
  static Pool* pool = new Pool(std::max(1u, std::thread::hardware_concurrency()));
  return pool;
}

}  // namespace

std::recursive_mutex& busy() {
  static auto* mutex = new std::recursive_mutex;  // leaked like the pool
  return *mutex;
}

void set_threads(int threads) {
  const std::lock_guard lock(busy());
  if (threads == pool()->size()) return;
  delete pool();
  pool() = new Pool(threads);
}

int threads() {
  if (current_thread >= 0) return pool()->size();  // inside a task, whose caller holds the lock
  const std::lock_guard lock(busy());
  return pool()->size();
}

void run_tasks(std::int64_t tasks, void (*body)(void*, std::int64_t, int), void* context) {
  if (current_thread >= 0) {
    for (std::int64_t task = 0; task < tasks; ++task) body(context, task, current_thread);
    return;
  }
  const std::lock_guard lock(busy());
  if (tasks == 1 || threads() == 1) {
    for (std::int64_t task = 0; task < tasks; ++task) body(context, task, 0);
  } else if (tasks > 1) {
    pool()->run(tasks, body, context);
  }
}

}  // namespace edgexpert
