// Who happens before whom on a device with streams: the bookkeeping behind device.cpp.
//
// [Note: Clocks]
// Work runs at once, in the order in which the host launches it, so that results are those of the CPU. Whether
// it *could* have run in another order is computed: each stream has a vector clock, which events, waits and
// host synchronizations pass on. Two accesses to the same bytes, one of them a write, that no clock orders are
// a conflict, whatever the timing of this run.
//
// [Note: Freed memory]
// Memory goes back to the stream that it was allocated on. What other streams may still do with it then
// (`record_stream` makes the allocator wait for them) is a *debt* of that stream: any memory that it allocates
// later could be the same, so the first access to it must be ordered after the debt.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace streamed {

using Clock = std::vector<uint64_t>;  // by stream: how much of its work is known to be done

inline void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

inline bool covers(const Clock& clock, int64_t stream, uint64_t time) {
  return static_cast<size_t>(stream) < clock.size() && clock[stream] >= time;
}

inline bool covers(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i)
    if (other[i] && !covers(clock, static_cast<int64_t>(i), other[i])) return false;
  return true;
}

struct Access {
  size_t start, stop;  // bytes of the block
  int64_t stream;
  uint64_t time;  // of the stream's clock
  bool writes;
  std::string what;
};

inline std::string describe(const Access& access) {
  std::ostringstream text;
  text << access.what << (access.writes ? " writes" : " reads") << " bytes " << access.start << " to "
       << access.stop << " on stream " << access.stream;
  return text.str();
}

// One allocation, and the accesses to it that a later one could still be in conflict with.
struct Block {
  size_t size;
  int64_t stream;  // that it was allocated on
  std::vector<Access> accesses;
  std::set<int64_t> recorded;  // record_stream

  // Conflicts of `now`, launched by a stream that knows `clock`.
  std::vector<std::string> add(const Access& now, const Clock& clock) {
    std::vector<std::string> conflicts;
    for (const Access& then : accesses) {
      bool overlap = then.start < now.stop && now.start < then.stop;
      if (overlap && (then.writes || now.writes) && !covers(clock, then.stream, then.time))
        conflicts.push_back(describe(now) + ", not ordered after: " + describe(then));
    }
    accesses.erase(
        std::remove_if(
            accesses.begin(),
            accesses.end(),
            [&](const Access& then) {
              bool inside = now.start <= then.start && then.stop <= now.stop;
              return inside && (now.writes || (!then.writes && then.stream == now.stream));
            }),
        accesses.end());
    accesses.push_back(now);
    return conflicts;
  }

  // What is not known to be done when the memory is given back to a stream that knows `clock`.
  std::vector<Access> debts(const Clock& clock) const {
    std::vector<Access> found;
    for (const Access& then : accesses)
      if (!recorded.count(then.stream) && !covers(clock, then.stream, then.time)) found.push_back(then);
    return found;
  }
};

}  // namespace streamed
