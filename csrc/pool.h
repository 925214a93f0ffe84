// A small pool of threads. Tasks are claimed one by one, the caller works too, and it waits for tasks, not for threads: threads
// that the system does not schedule cost nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <type_traits>

namespace edgexpert {

// One call at a time uses the pool, and the memory that its users keep between calls; who keeps such memory holds this throughout.
std::recursive_mutex& busy();

void set_threads(int threads);  // the caller included
int threads();

// Runs body(context, task, thread) for every task in [0, tasks); thread is in [0, threads()). The first exception of a task reaches
// the caller when all tasks are through. Inside a task, tasks run one after the other on the thread that is there.
void run_tasks(std::int64_t tasks, void (*body)(void*, std::int64_t, int), void* context);

template <class F>
void parallel_for(std::int64_t tasks, F&& f) {
  run_tasks(
      tasks, [](void* context, std::int64_t task, int thread) { (*static_cast<std::remove_reference_t<F>*>(context))(task, thread); },
      &f);
}

// Runs body(begin, end) over [0, count) in pieces of `size`, or in one piece where the work, in operations, is not worth waking a
// thread for.
template <class F>
void in_pieces(std::int64_t count, std::int64_t size, std::int64_t work, F&& body) {
  constexpr std::int64_t small = 65536;
  if (work < small) return body(0, count);
  parallel_for((count + size - 1) / size,
               [&](std::int64_t piece, int) { body(piece * size, std::min(count, (piece + 1) * size)); });
}

}  // namespace edgexpert
