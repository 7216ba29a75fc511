/* Kernels of two ranks of one server as threads, for the thread sanitizer: payload is plain memory, so whatever order is missing
 * is a race that it reports. Nothing stands between the two but kernels/local.cuh.
 *
 *     local THREADS DEPTH    kernel threads on each side; slots
 */

#include <fuselink/device.cuh>

#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

thread_local const FlBlock* fl_this_block = nullptr;

static const uint64_t kMessages = 600;
static const uint64_t kMessageBytes = 64;
static const uint64_t kTimeoutNs = 60ull * 1000 * 1000 * 1000;

/* What a GPU keeps for the streams of its server. */
struct Memory {
  FlLocalEnd ends[2];
  uint64_t signals[1];
  alignas(64) uint8_t slots[2][FL_LOCAL_DEPTH][kMessageBytes];
};

struct Rank {
  Memory memory;
  FlChannel channel;
  FlStream stream;
  FlStatus status;
  uint64_t queue_next[2], taken[2], completed[2], signals[1], seen[1], abort, ends[2];
};

static Rank ranks[2];
static uint64_t source[kMessages][kMessageBytes / 8];
static uint64_t next_put, next_take, times_taken[kMessages];

static uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

static void describe(uint32_t own, uint32_t depth) {
  Rank* r = &ranks[own];
  for (uint32_t i = 0; i < 2; ++i) r->ends[i] = address(&ranks[i].memory);
  r->channel.queue_next_ptr = address(r->queue_next);
  r->channel.abort_ptr = address(&r->abort);
  r->channel.status_ptr = address(&r->status);
  r->stream.channel_ptr = address(&r->channel);
  r->stream.slot_bytes = kMessageBytes;
  r->stream.timeout_ns = kTimeoutNs;
  r->stream.ranks = 2;
  r->stream.signals = 1;
  r->stream.taken_ptr = address(r->taken);
  r->stream.completed_ptr = address(r->completed);
  r->stream.signals_ptr = address(r->signals);
  r->stream.seen_ptr = address(r->seen);
  r->stream.local_ends_ptr = address(r->ends);
  r->stream.local_signals_offset = offsetof(Memory, signals);
  r->stream.local_slots_offset = offsetof(Memory, slots);
  r->stream.local_ranks = 2;
  r->stream.local_rank = own;
  r->stream.local_depth = depth;
}

static void check(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "%s (status %llu, %llu)\n", what, (unsigned long long)ranks[0].status.code,
          (unsigned long long)ranks[1].status.code);
  exit(1);
}

static void block_copy(void*, uint64_t dst, uint64_t src, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes / 8; ++i) fl_at<uint64_t>(dst)[i] = fl_at<uint64_t>(src)[i];
}
static void block_pause(void*, uint32_t) { sched_yield(); }
static void block_count(void*, uint64_t, uint64_t, uint32_t) {}
static const FlBlock block = {0, 1, nullptr, block_copy, block_pause, block_count};

static void* put(void*) {
  fl_this_block = &block;
  FlThreadScope thread;
  const FlStream* s = &ranks[0].stream;
  for (;;) {
    uint64_t i = fl_add_acq_rel_gpu(&next_put, 1);
    if (i >= kMessages) break;
    for (uint64_t& word : source[i]) word = i + 1;
    check(fl_put_with_signal(thread, s, 1, address(source[i]), kMessageBytes, fl_add_to(0, 1)), "put");
    /* A signal by itself has a slot too, which nobody gives back. */
    if (i % 3 == 0) check(fl_signal(thread, s, 1, fl_add_to(0, 0)), "signal");
  }
  check(fl_flush(thread, s, 1), "flush");
  return nullptr;
}

static void* take(void*) {
  fl_this_block = &block;
  FlThreadScope thread;
  const FlStream* s = &ranks[1].stream;
  for (;;) {
    uint64_t i = fl_add_acq_rel_gpu(&next_take, 1);
    if (i >= kMessages) break;
    /* Every other message is waited for by its signal: then it must be there. */
    if (i % 2 == 0) check(fl_wait(thread, s, 0, i + 1), "wait");
    FlMessage message = fl_wait_message(thread, s, 0);
    check(message.addr != 0, "message");
    const uint64_t* words = fl_at<const uint64_t>(message.addr);
    for (uint64_t w = 1; w < kMessageBytes / 8; ++w) check(words[w] == words[0], "torn payload");
    times_taken[words[0] - 1] += 1;
    check(fl_give_back(thread, s, message), "give back");
  }
  return nullptr;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  uint32_t threads = (uint32_t)atoi(argv[1]), depth = (uint32_t)atoi(argv[2]);
  if (threads < 1 || threads > 3 || depth < 1 || depth > FL_LOCAL_DEPTH || (depth & (depth - 1))) return 2;
  for (uint32_t own = 0; own < 2; ++own) describe(own, depth);
  pthread_t id[6];
  for (uint32_t i = 0; i < 2 * threads; ++i) pthread_create(&id[i], nullptr, i % 2 ? take : put, nullptr);
  for (uint32_t i = 0; i < 2 * threads; ++i) pthread_join(id[i], nullptr);
  for (uint64_t times : times_taken) check(times == 1, "a message came more or less than once");
  check(ranks[1].memory.signals[0] == kMessages, "signals");
  puts("all messages came");
  return 0;
}
