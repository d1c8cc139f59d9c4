// Streams that run late: what is enqueued runs at some later time, in an order that only streams and events constrain.
//
// A worker runs tasks, one at a time. It runs only what somebody waits for, and, as a seed decides, a few others. The
// memory of tasks is not kept for them, as on a device: a pool for each stream gives freed blocks to later allocations
// on that stream, after a task of that stream has filled them with NaN.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

namespace late {

using StreamId = int64_t;

// A point in a stream, which is reached when so many of its tasks have run.
struct Position {
  StreamId stream = 0;
  int64_t count = 0;
};

struct Task {
  std::function<void()> run;
  // What the task waits for on other streams, and outside of the device.
  std::optional<Position> after = {};
  std::function<bool()> ready = {};
};

class Device {
 public:
  // Let streams run late from now on, in an order that a seed decides.
  void start(uint64_t seed) {
    drain_all();
    std::lock_guard<std::mutex> lock(mutex_);
    random_.seed(seed);
    constexpr double AT_ENQUEUE[] = {0.0, 0.0, 0.1, 0.4};
    constexpr double OTHERS[] = {0.0, 0.0, 0.2, 0.6};
    run_at_enqueue_ = AT_ENQUEUE[random_() % 4];
    run_others_ = OTHERS[random_() % 4];
    if (!worker_.joinable()) {
      worker_ = std::thread([this] { work(); });
    }
    is_late_ = true;
  }

  // Run all that is enqueued, and run later tasks at once.
  void finish() {
    drain_all();
    is_late_ = false;
  }

  // End the worker, before the process takes down what tasks need. What is enqueued does not run any more.
  void stop() {
    is_late_ = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_stopped_ = true;
    }
    asked_.notify_all();
    if (worker_.joinable()) {
      worker_.join();
    }
  }

  bool is_late() const {
    return is_late_;
  }

  Position enqueue(StreamId stream, Task task) {
    if (!is_late_) {
      task.run();
      return {stream, 0};
    }
    std::unique_lock<std::mutex> lock(mutex_);
    auto& queue = queues_[stream];
    queue.tasks.push_back(std::move(task));
    ++activity_;
    const Position end{stream, queue.end()};
    if (!on_worker_ && chance(run_at_enqueue_)) {
      run_some(lock, 1 + random_() % 4);
    }
    return end;
  }

  // What has been enqueued on a stream so far.
  Position here(StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return {stream, queues_[stream].end()};
  }

  // Let what is enqueued on a stream from now on wait for a position of another.
  void order(StreamId stream, Position after) {
    if (is_late_ && stream != after.stream) {
      enqueue(stream, {[] {}, after});
    }
  }

  // A collective, without which other ranks may not go on.
  Position enqueue_collective(StreamId stream, Task start, Task end) {
    enqueue(stream, std::move(start));
    const auto position = enqueue(stream, std::move(end));
    std::lock_guard<std::mutex> lock(mutex_);
    collectives_[stream] = position;
    return position;
  }

  // Collectives of a stream may fail from now on, and nobody hears of those that have failed.
  void abandon(StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    abandoned_.insert(stream);
    if (failed_ == stream) {
      failure_ = nullptr;
    }
  }

  bool is_reached(Position position) {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached(position);
  }

  // Ask whether a position is reached; who asks often enough gets it.
  bool poll(Position position) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!reached(position)) {
      run_some(lock, 1);
    }
    return reached(position);
  }

  // Let the host wait for a position, for which what it depends on has to run, and no more.
  void drain(Position position) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!reached(position)) {
      targets_.push_back(position);
      asked_.notify_all();
      moved_.wait(lock, [&] { return reached(position); });
    }
    if (failure_) {
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }

  void drain_all() {
    std::vector<Position> ends;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [stream, queue] : queues_) {
        ends.push_back({stream, queue.end()});
      }
    }
    for (const auto& end : ends) {
      drain(end);
    }
  }

 private:
  // A host that is quiet for so long may wait for another rank, which may wait for a collective.
  static constexpr auto QUIET = std::chrono::microseconds(10'000);
  static constexpr auto POLL = std::chrono::microseconds(50);

  struct Queue {
    std::deque<Task> tasks;
    int64_t done = 0;
    int64_t end() const {
      return done + static_cast<int64_t>(tasks.size());
    }
  };

  bool reached(Position position) {
    return queues_[position.stream].done >= position.count;
  }

  bool chance(double probability) {
    return std::uniform_real_distribution<>(0, 1)(random_) < probability;
  }

  void run_some(std::unique_lock<std::mutex>& lock, int64_t count) {
    others_ += count;
    asked_.notify_all();
    moved_.wait(lock, [&] { return others_ == 0; });
  }

  // Find the stream whose first task has to run next, so that a position is reached.
  std::optional<StreamId> next_for(Position position) {
    while (!reached(position)) {
      const auto& head = queues_[position.stream].tasks.front();
      if (head.after && !reached(*head.after)) {
        position = *head.after;
        continue;
      }
      if (head.ready && !head.ready()) {
        return std::nullopt;
      }
      return position.stream;
    }
    return std::nullopt;
  }

  std::optional<StreamId> choose() {
    std::set<StreamId> candidates;
    const auto consider = [&](Position position) {
      if (const auto stream = next_for(position)) {
        candidates.insert(*stream);
      }
    };
    std::erase_if(targets_, [&](Position target) { return reached(target); });
    if (others_ > 0 || (!targets_.empty() && chance(run_others_))) {
      for (const auto& [stream, queue] : queues_) {
        consider({stream, queue.end()});
      }
    } else {
      for (const auto& target : targets_) {
        consider(target);
      }
    }
    if (candidates.empty()) {
      return std::nullopt;
    }
    return *std::next(candidates.begin(), static_cast<int64_t>(random_() % candidates.size()));
  }

  void work() {
    on_worker_ = true;
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    std::unique_lock<std::mutex> lock(mutex_);
    std::chrono::microseconds quiet{};
    while (!is_stopped_) {
      if (const auto stream = choose()) {
        run_first(lock, *stream);
        others_ = std::max<int64_t>(others_ - 1, 0);
        moved_.notify_all();
        continue;
      }
      others_ = 0;
      moved_.notify_all();
      const auto before = activity_;
      const auto slept = targets_.empty() ? QUIET : POLL;
      if (asked_.wait_for(lock, slept) == std::cv_status::no_timeout || activity_ != before) {
        quiet = {};
        continue;
      }
      quiet += slept;
      if (quiet >= QUIET) {
        // Another rank may wait for a collective of this one, be it that the host waits for another, or for that rank.
        for (const auto& [stream, end] : collectives_) {
          targets_.push_back(end);
        }
        quiet = {};
      }
    }
  }

  // The task stays first in its queue while it runs, so that its position is not reached.
  void run_first(std::unique_lock<std::mutex>& lock, StreamId stream) {
    auto& queue = queues_[stream];
    Task& task = queue.tasks.front();
    lock.unlock();
    std::exception_ptr failure;
    try {
      task.run();
    } catch (...) {
      failure = std::current_exception();
    }
    // What it holds is released before anybody hears of its end.
    task.run = nullptr;
    task.ready = nullptr;
    lock.lock();
    if (failure && !failure_ && !abandoned_.contains(stream)) {
      failure_ = failure;
      failed_ = stream;
    }
    queue.tasks.pop_front();
    ++queue.done;
  }

  static inline thread_local bool on_worker_ = false;
  std::atomic<bool> is_late_{false};
  std::mutex mutex_;
  std::condition_variable asked_;
  std::condition_variable moved_;
  std::thread worker_;
  bool is_stopped_ = false;
  std::mt19937_64 random_;
  double run_at_enqueue_ = 0;
  double run_others_ = 0;
  // Only added to: references to a queue, and to its first task, stay valid.
  std::map<StreamId, Queue> queues_;
  // The end of the last collective of each stream.
  std::map<StreamId, Position> collectives_;
  // What the host waits for.
  std::vector<Position> targets_;
  // How many other tasks are to run.
  int64_t others_ = 0;
  int64_t activity_ = 0;
  // Of the first task that failed, for the next wait of the host, and the stream of that task.
  std::exception_ptr failure_;
  StreamId failed_ = 0;
  std::set<StreamId> abandoned_;
};

// Never destroyed, because tensors may outlive the library's variables.
inline Device& device = *new Device;

// The owner of pinned memory, which is filled with NaN by the host as soon as no stream uses it.
constexpr StreamId HOST = -1;

// A pool of blocks for each stream, which never gives memory back.
class Pools {
 public:
  void* allocate(size_t nbytes, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    recycle();
    const size_t size = std::bit_ceil(std::max(nbytes, ALIGNMENT));
    auto& free = free_[{stream, size}];
    if (free.empty()) {
      auto* block = new Block{std::aligned_alloc(ALIGNMENT, size), size, stream};
      std::memset(block->memory, POISON, size);
      blocks_[block->memory] = block;
      return block->memory;
    }
    auto* block = free.back();
    free.pop_back();
    return block->memory;
  }

  // The block may be used again by its stream at once, and only when streams that use it have come this far.
  void release(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = blocks_.at(memory);
    for (const auto stream : std::exchange(block->users, {})) {
      block->ends.push_back(device.here(stream));
    }
    used_.push_back(block);
    recycle();
  }

  void record_use(const void* memory, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = blocks_.find(memory);
    if (entry != blocks_.end() && entry->second->stream != stream) {
      entry->second->users.insert(stream);
    }
  }

  bool is_pinned(const void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = blocks_.find(memory);
    return entry != blocks_.end() && entry->second->stream == HOST;
  }

 private:
  static constexpr size_t ALIGNMENT = 64;
  // All bits, which are NaN in each floating dtype, and an index that is out of range.
  static constexpr int POISON = 0xFF;

  struct Block {
    void* memory;
    size_t size;
    StreamId stream;
    std::set<StreamId> users = {};
    std::vector<Position> ends = {};
  };

  void recycle() {
    std::vector<Block*> waiting;
    for (auto* block : std::exchange(used_, {})) {
      std::erase_if(block->ends, [](Position end) { return device.is_reached(end); });
      if (!block->ends.empty()) {
        waiting.push_back(block);
        continue;
      }
      const auto poison = [block] { std::memset(block->memory, POISON, block->size); };
      if (block->stream == HOST) {
        poison();
      } else {
        device.enqueue(block->stream, {poison});
      }
      free_[{block->stream, block->size}].push_back(block);
    }
    used_ = std::move(waiting);
  }

  std::mutex mutex_;
  std::unordered_map<const void*, Block*> blocks_;
  std::map<std::pair<StreamId, size_t>, std::vector<Block*>> free_;
  // Freed, while streams may use them.
  std::vector<Block*> used_;
};

inline Pools& pools = *new Pools;

} // namespace late
