/* Kernels and host of one-sided puts as threads, for the thread sanitizer: payload is plain memory, so whatever order is
 * missing is a race that it reports. The host here does what host/channel.rs and host/ring.rs do, fence for fence.
 *
 *     puts THREADS DEPTH    kernel threads on each side; slots, and places in each ring
 */

#include <fuselink/device.cuh>

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

thread_local const FlBlock* fl_this_block = nullptr;

static const uint64_t kMessages = 400;
static const uint64_t kMessageBytes = 64;
static const uint64_t kTimeoutNs = 60ull * 1000 * 1000 * 1000;
static const uint32_t kMaxDepth = 16;

/* What one GPU shares with its host. */
struct Gpu {
  FlChannel channel;
  FlStream stream;
  FlRing ring;
  FlDoorbell doorbells[kMaxDepth];
  uint64_t prod_idx, cons_idx, queue_next;
  FlArmedSlot armed[kMaxDepth];
  FlArrival arrivals[kMaxDepth];
  uint64_t taken, completed, abort;
  uint64_t signals[1], seen[1];
  FlStatus status;
  alignas(16) uint8_t slots[kMaxDepth][kMessageBytes];
};

static Gpu sender, receiver;
static uint64_t source[kMessages][kMessageBytes / 8];
static uint64_t next_put, next_take, handed_over;
static uint32_t depth;

static uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

static void describe(Gpu* g) {
  g->ring = FlRing{address(g->doorbells), address(&g->prod_idx), address(&g->cons_idx), depth};
  g->channel.doorbell_rings = 1;
  g->channel.armed_depth = depth;
  g->channel.doorbell_rings_ptr = address(&g->ring);
  g->channel.armed_ptr = address(g->armed);
  g->channel.queue_next_ptr = address(&g->queue_next);
  g->channel.abort_ptr = address(&g->abort);
  g->channel.status_ptr = address(&g->status);
  g->stream = FlStream{address(&g->channel), kMessageBytes,         kTimeoutNs,
                       FL_CLASS_PUT,         1,                     depth,
                       1,                    address(g->arrivals),  address(&g->taken),
                       address(&g->completed), address(g->signals), address(g->seen)};
}

static void check(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "%s (status %llu, %llu)\n", what, (unsigned long long)sender.status.code,
          (unsigned long long)receiver.status.code);
  exit(1);
}

/* ---- kernels ---- */

static void block_copy(void*, uint64_t dst, uint64_t src, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes / 8; ++i) fl_at<uint64_t>(dst)[i] = fl_at<uint64_t>(src)[i];
}
static void block_pause(void*, uint32_t) { sched_yield(); }
static void block_count(void*, uint64_t, uint64_t, uint32_t) {}
static const FlBlock block = {0, 1, nullptr, block_copy, block_pause, block_count};

static void* put(void*) {
  fl_this_block = &block;
  for (;;) {
    uint64_t i = fl_add_acq_rel_gpu(&next_put, 1);
    if (i >= kMessages) break;
    FlThreadScope thread;
    for (uint64_t& word : source[i]) word = i + 1;
    check(fl_put_with_signal(thread, &sender.stream, 0, address(source[i]), kMessageBytes, fl_add_to(0, 1)), "put");
  }
  check(fl_flush(FlThreadScope(), &sender.stream, 0), "flush");
  /* What a flush promises: the bytes are there for whoever looks. */
  check(handed_over > 0, "a flush before anything was carried");
  return nullptr;
}

static void* take(void*) {
  fl_this_block = &block;
  FlThreadScope thread;
  while (fl_add_acq_rel_gpu(&next_take, 1) < kMessages) {
    FlMessage message = fl_wait_message(thread, &receiver.stream, 0);
    check(message.addr != 0, "message");
    const uint64_t* words = fl_at<const uint64_t>(message.addr);
    for (uint64_t i = 1; i < kMessageBytes / 8; ++i) check(words[i] == words[0], "torn payload");
    check(fl_give_back(thread, &receiver.stream, message), "give back");
  }
  return nullptr;
}

/* ---- host: one thread for both ends ---- */

struct Consumer {
  Gpu* gpu;
  uint64_t idx;
};

static bool pop(Consumer* c, uint64_t word[4]) {
  uint64_t lap = fl_lap(c->idx, depth);
  for (int i = 0; i < 4; ++i) {
    word[i] = fl_load_relaxed_sys(&c->gpu->doorbells[c->idx % depth].word[i]);
    if (!fl_shows_lap(word[i], lap)) return false;
    word[i] = fl_without_lap(word[i]);
  }
  fl_fence_sys();
  c->idx += 1;
  fl_store_release_sys(&c->gpu->cons_idx, c->idx);
  return true;
}

static void arm(uint64_t idx) {
  FlArmedSlot* place = &sender.armed[idx % depth];
  uint64_t lap = fl_lap(idx, depth);
  fl_fence_sys();
  fl_store_relaxed_sys(&place->dev_addr, fl_with_lap(address(sender.slots[idx % depth]), lap));
  fl_store_relaxed_sys(&place->message, fl_with_lap(idx, lap));
}

static void publish(uint64_t idx, uint64_t slot) {
  FlArrival* place = &receiver.arrivals[idx % depth];
  uint64_t lap = fl_lap(idx, depth);
  fl_fence_sys();
  fl_store_relaxed_sys(&place->dev_addr, fl_with_lap(address(receiver.slots[slot]), lap));
  fl_store_relaxed_sys(&place->seq, fl_with_lap(idx, lap));
  fl_store_relaxed_sys(&place->src_bytes, fl_with_lap(kMessageBytes, lap));
  fl_store_relaxed_sys(&place->slot, fl_with_lap(slot, lap));
}

static void* host(void*) {
  Consumer from = {&sender, 0}, to = {&receiver, 0};
  bool rung[kMaxDepth] = {}, free_slot[kMaxDepth];
  for (bool& f : free_slot) f = true;
  uint64_t armed = 0, carried = 0, given_back = 0, word[4];
  while (given_back < kMessages) {
    while (armed < kMessages && armed < carried + depth) arm(armed++);
    while (pop(&from, word)) rung[word[1] % depth] = true;
    while (pop(&to, word)) {
      free_slot[word[1]] = true;
      given_back += 1;
    }
    uint64_t slot = 0;
    while (slot < depth && !free_slot[slot]) slot += 1;
    if (carried < armed && rung[carried % depth] && slot < depth) {
      rung[carried % depth] = free_slot[slot] = false;
      block_copy(nullptr, address(receiver.slots[slot]), address(sender.slots[carried % depth]), kMessageBytes);
      handed_over = carried + 1;
      publish(carried, slot);
      fl_fence_sys();
      fl_store_relaxed_sys(receiver.signals, carried + 1);
      carried += 1;
      if (carried == kMessages) fl_store_release_sys(&sender.completed, carried);
    }
    sched_yield();
  }
  return nullptr;
}

/* ---- a signal beside memory that no message carries: what fl_wait and fl_poll order ---- */

static uint64_t beside;

static void* wait_for_signal(void* wait) {
  fl_this_block = &block;
  if (wait) {
    check(fl_wait(FlThreadScope(), &receiver.stream, 0, kMessages + 1), "signal");
  } else {
    while (fl_poll(FlThreadScope(), &receiver.stream, 0) <= kMessages) sched_yield();
  }
  check(beside == 1, "the signal came before what it tells of");
  return nullptr;
}

static void* signal(void*) {
  beside = 1;
  fl_fence_sys();
  fl_store_relaxed_sys(receiver.signals, kMessages + 1);
  return nullptr;
}

static void run(void* (*const* threads)(void*), void* argument, uint32_t count) {
  pthread_t id[8];
  for (uint32_t i = 0; i < count; ++i) pthread_create(&id[i], nullptr, threads[i], argument);
  for (uint32_t i = 0; i < count; ++i) pthread_join(id[i], nullptr);
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  uint32_t threads = (uint32_t)atoi(argv[1]);
  depth = (uint32_t)atoi(argv[2]);
  if (threads < 1 || threads > 3 || depth < 1 || depth > kMaxDepth || (depth & (depth - 1))) return 2;
  describe(&sender);
  describe(&receiver);
  void* (*all[8])(void*) = {host};
  for (uint32_t i = 0; i < threads; ++i) {
    all[1 + i] = put;
    all[1 + threads + i] = take;
  }
  run(all, nullptr, 1 + 2 * threads);
  check(sender.status.code == FL_STATUS_OK && receiver.status.code == FL_STATUS_OK, "a kernel gave up");
  for (uintptr_t wait = 0; wait < 2; ++wait) {
    void* (*const both[2])(void*) = {wait_for_signal, signal};
    fl_store_release_sys(receiver.signals, kMessages);
    beside = 0;
    run(both, reinterpret_cast<void*>(wait), 2);
  }
  puts("all messages came");
  return 0;
}
