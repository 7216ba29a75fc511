/* Streams between ranks of one server, and from a rank to itself: from kernel to kernel in memory of the GPUs, with no host
 * on the way. device.cuh calls this for such ranks; docs/memory-model.md argues the order.
 *
 * Message seq of a stream lies in slot seq % local_depth of the receiver's memory, where the sender's threads store it.
 *
 *   claimed   by the counter of the queue, once the receiver has given back message seq - local_depth (`released`, an absolute
 *             value, so that no lap can be mistaken for another)
 *   filled    by the scope that claimed it; `sends` says how long it is and what it signals
 *   shown     in order of seq: an entry in the receiver's inbox, then its signal
 *   taken     by the counter of the source, read in place, and given back: `released`
 *
 * Messages are filled in any order and shown in theirs, by one thread at a time, which nobody chooses and nobody waits for:
 * `front` holds the message that is next and a bit for each one behind it that is filled. Who has filled the next one shows it
 * and moves `front` on; when that uncovers a bit, it shows that message too. Who has filled another sets its bit and leaves:
 * both change one word, so either the bit is uncovered by whoever moves `front` on, or the message is seen to be next.
 * A message that was shown may be taken and its slot filled again before `front` has moved, so there are local_depth + 1 bits. */
#ifndef FUSELINK_LOCAL_CUH
#define FUSELINK_LOCAL_CUH

#include "relay.cuh"

/* Whether a rank is of this server. */
FL_FN bool fl_is_local(const FlStream* s, uint32_t rank) { return rank - s->first_local_rank < s->local_ranks; }

/* Where a rank of this server (by its place there) keeps what belongs to such streams. */
FL_FN uint64_t fl_local_memory(const FlStream* s, uint32_t holder) { return fl_at<uint64_t>(s->local_ends_ptr)[holder]; }

FL_FN FlLocalEnd* fl_local_end(const FlStream* s, uint32_t holder, uint32_t other) {
  return fl_at<FlLocalEnd>(fl_local_memory(s, holder)) + other;
}

FL_FN uint64_t fl_local_slot(const FlStream* s, uint32_t receiver, uint32_t source, uint64_t seq) {
  uint64_t slot = (uint64_t)source * s->local_depth + seq % s->local_depth;
  return fl_local_memory(s, receiver) + s->local_slots_offset + slot * s->slot_bytes;
}

FL_FN uint64_t* fl_local_signal(const FlStream* s, uint32_t receiver, uint32_t signal) {
  return fl_at<uint64_t>(fl_local_memory(s, receiver) + s->local_signals_offset) + signal;
}

/* ---- Sending ---- */

/* Claims the next slot for a rank of this server if its last message was given back. One thread. */
FL_FN FlSlot fl_claim_local_slot(const FlStream* s, uint64_t* next, uint32_t dst) {
  uint32_t to = dst - s->first_local_rank;
  uint64_t idx = fl_load_acquire_gpu(next), depth = s->local_depth;
  const uint64_t* released = &fl_local_end(s, s->local_rank, to)->released[idx % depth];
  if (idx >= depth && fl_load_relaxed_sys(released) != idx - depth + 1) return FlSlot{0, 0, idx};
  if (!fl_cas_acq_rel_gpu(next, idx, idx + 1)) return FlSlot{0, 0, idx};
  fl_fence_sys(); /* the receiver's loads of the message before, from the slot, before the stores of this one */
  return FlSlot{fl_local_slot(s, to, s->local_rank, idx), idx, idx};
}

/* What a message does to a signal of its receiver: after the entries of all messages up to this one. */
FL_FN void fl_change_local_signal(const FlStream* s, uint32_t to, const FlLocalSend& send) {
  uint64_t* signal = fl_local_signal(s, to, (uint32_t)(send.signal >> 48) - 1);
  if ((send.signal >> 12 & 0xf) == FL_SIGNAL_SET) {
    fl_exchange_release_sys(signal, send.value);
  } else {
    fl_add_release_sys(signal, send.value);
  }
}

/* Shows message `seq`, which is next, to its receiver. A message of 0 bytes is its signal alone: its slot is free again. */
FL_FN void fl_show_local(const FlStream* s, uint32_t to, uint64_t seq) {
  FlLocalEnd* own = fl_local_end(s, s->local_rank, to);
  FlLocalEnd* theirs = fl_local_end(s, to, s->local_rank);
  const FlLocalSend* place = &own->sends[seq % s->local_depth];
  FlLocalSend send = {fl_load_relaxed_gpu(&place->bytes), fl_load_relaxed_gpu(&place->signal),
                      fl_load_relaxed_gpu(&place->value)};
  fl_fence_sys(); /* payload, of this scope or of one that has left its message, before what tells of it */
  if (send.bytes > 0) {
    uint64_t n = fl_load_relaxed_gpu(&own->shown), lap = fl_lap(n, s->local_depth);
    FlLocalArrival* entry = &theirs->inbox[n % s->local_depth];
    fl_store_relaxed_sys(&entry->seq, fl_with_lap(seq, lap));
    fl_store_relaxed_sys(&entry->bytes, fl_with_lap(send.bytes, lap));
    fl_store_relaxed_gpu(&own->shown, n + 1);
  } else {
    fl_store_relaxed_sys(&own->released[seq % s->local_depth], seq + 1);
  }
  if (send.signal != 0) fl_change_local_signal(s, to, send);
}

/* Whether message `seq`, which is filled, is the next to be shown. If not, it is left to whoever shows the one before. */
FL_FN bool fl_is_next_local(uint64_t* front, uint64_t seq) {
  for (;;) {
    uint64_t seen = fl_load_acquire_gpu(front);
    uint64_t ahead = seq - (seen >> FL_LOCAL_FRONT_SHIFT);
    if (ahead == 0) return true;
    if (fl_cas_acq_rel_gpu(front, seen, seen | 1ull << ahead)) return false;
  }
}

/* Moves on behind a message that was shown; whether the next one is filled already. */
FL_FN bool fl_move_front_on(uint64_t* front) {
  for (;;) {
    uint64_t seen = fl_load_relaxed_gpu(front);
    uint64_t filled = (seen & ((1ull << FL_LOCAL_FRONT_SHIFT) - 1)) >> 1;
    uint64_t moved = ((seen >> FL_LOCAL_FRONT_SHIFT) + 1) << FL_LOCAL_FRONT_SHIFT | filled;
    if (fl_cas_acq_rel_gpu(front, seen, moved)) return filled & 1;
  }
}

/* Messages to a rank of this server below this one are in its memory, and shown. */
FL_FN uint64_t fl_shown_local(const FlStream* s, uint32_t dst) {
  const FlLocalEnd* own = fl_local_end(s, s->local_rank, dst - s->first_local_rank);
  return fl_load_acquire_gpu(&own->front) >> FL_LOCAL_FRONT_SHIFT;
}

/* Sends message `seq`, which the caller has claimed and its scope has filled. One thread, after the scope's barrier. */
FL_FN void fl_send_local(const FlStream* s, uint32_t dst, uint64_t seq, FlLocalSend send) {
  uint32_t to = dst - s->first_local_rank;
  FlLocalEnd* own = fl_local_end(s, s->local_rank, to);
  FlLocalSend* place = &own->sends[seq % s->local_depth];
  fl_store_relaxed_gpu(&place->bytes, send.bytes);
  fl_store_relaxed_gpu(&place->signal, send.signal);
  fl_store_relaxed_gpu(&place->value, send.value);
  if (!fl_is_next_local(&own->front, seq)) return;
  do {
    fl_show_local(s, to, seq);
    seq += 1;
  } while (fl_move_front_on(&own->front));
}

/* ---- Taking ---- */

/* Claims the next message of a rank of this server if it has come. One thread. */
FL_FN FlMessage fl_claim_local_message(const FlStream* s, uint64_t* next, uint32_t src) {
  uint32_t from = src - s->first_local_rank;
  uint64_t n = fl_load_acquire_gpu(next), lap = fl_lap(n, s->local_depth);
  const FlLocalArrival* entry = &fl_local_end(s, s->local_rank, from)->inbox[n % s->local_depth];
  uint64_t seq = fl_load_relaxed_sys(&entry->seq), bytes = fl_load_relaxed_sys(&entry->bytes);
  FlMessage none = {0, 0, 0, 0, 0};
  if (!fl_shows_lap(seq, lap) || !fl_shows_lap(bytes, lap)) return none;
  if (!fl_cas_acq_rel_gpu(next, n, n + 1)) return none;
  fl_fence_sys(); /* the entry before the payload: pairs with fl_show_local */
  seq = fl_without_lap(seq);
  return FlMessage{fl_local_slot(s, s->local_rank, from, seq), seq, src, (uint32_t)bytes, 0};
}

/* Gives the slot of a message back. One thread, after the barrier of the scope that has read it. */
FL_FN void fl_release_local(const FlStream* s, const FlMessage& message) {
  FlLocalEnd* theirs = fl_local_end(s, message.src - s->first_local_rank, s->local_rank);
  fl_fence_sys(); /* loads of the payload before the slot is the sender's again: pairs with fl_claim_local_slot */
  fl_store_relaxed_sys(&theirs->released[message.seq % s->local_depth], message.seq + 1);
}

#endif
