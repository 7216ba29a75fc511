/* Kernels for graphs: launched again and again with the same parameters, which nobody writes between. What changes from round
 * to round lies in device memory. tests/common/replay.rs mirrors this. */

#include <fuselink/device.cuh>

struct Replay {
  FlStream stream;
  uint64_t data_ptr; /* put: a message; take: messages of all rounds, one after the other */
  uint64_t bytes;    /* of a message: words, the first says which round, the second which message of the round */
  uint64_t messages; /* of a round */
  uint64_t round;    /* scratch: rounds so far */
  uint64_t ended;    /* scratch: blocks of this round that have ended */
  uint32_t peer;
  uint32_t reserved;
};

/* Every other message is written where it leaves from, the others are copied there. */
FL_FN bool send_message(Replay* p, uint64_t round, uint64_t i) {
  FlBlockScope block;
  FlSlot slot = fl_wait_slot(block, &p->stream, p->peer);
  if (slot.addr == 0) return false;
  uint64_t* words = fl_at<uint64_t>(slot.addr);
  if (i % 2 == 0) {
    for (uint64_t w = 2 + fl_thread_idx(); w < p->bytes / 8; w += fl_thread_count()) words[w] = round << 32 | i << 16 | w;
  } else {
    fl_copy(block, slot.addr + 16, p->data_ptr + 16, p->bytes - 16);
  }
  if (fl_elected(block)) {
    words[0] = round;
    words[1] = i;
  }
  return fl_send_with_signal(block, &p->stream, p->peer, slot, p->bytes, fl_add_to(0, 1));
}

/* The last block to end begins the next round; all of them read the number before. */
FL_FN void end_round(Replay* p, uint64_t round) {
  if (!fl_elected() || fl_add_acq_rel_gpu(&p->ended, 1) + 1 != fl_block_count()) return;
  fl_store_relaxed_gpu(&p->round, round + 1);
  fl_store_relaxed_gpu(&p->ended, 0);
}

FL_KERNEL(test_replay_put, Replay) {
  uint64_t round = fl_broadcast(fl_load_relaxed_gpu(&p->round));
  for (uint64_t i = fl_block_idx(); i < p->messages; i += fl_block_count()) {
    if (!send_message(p, round, i)) return;
  }
  if (fl_flush(FlBlockScope(), &p->stream, p->peer)) end_round(p, round);
}

/* One block: takes a round's messages as they come; then the signal must have grown by as many. */
FL_KERNEL(test_replay_take, Replay) {
  FlBlockScope block;
  uint64_t round = fl_broadcast(fl_load_relaxed_gpu(&p->round));
  for (uint64_t n = 0; n < p->messages; ++n) {
    FlMessage message = fl_wait_message(block, &p->stream, p->peer);
    if (message.addr == 0) return;
    uint64_t to = p->data_ptr + (round * p->messages + n) * p->bytes;
    fl_copy(block, to, message.addr, message.bytes < p->bytes ? message.bytes : p->bytes);
    if (!fl_give_back(block, &p->stream, message)) return;
  }
  if (fl_wait_more(block, &p->stream, 0, p->messages)) end_round(p, round);
}
