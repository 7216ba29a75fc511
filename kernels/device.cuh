/* One-sided puts for kernels of your own: the header to include.
 *
 *     #include <fuselink/device.cuh>
 *
 * where `fuselink` is a folder on the include path that holds (or links to) this one; nothing but the compiler's own
 * headers is needed beside it. A kernel is given an FlStream, which stays as it is from launch to launch.
 *
 * A *stream* is the messages from one rank to another one, or to itself, each at most slot_bytes long, numbered in
 * the order in which their slots were claimed. Every call says for whom it is made: FlThreadScope, FlWarpScope or
 * FlBlockScope. All threads of that scope make the call together, with the same arguments, and get the same result.
 * Where a rank is makes no difference to the caller: messages to other servers go by the host and its NICs (relay.cuh), those
 * within the server from kernel to kernel (local.cuh).
 *
 * What is ordered:
 *  - a message's bytes are there before whoever takes it, or sees its signal, is told;
 *  - messages of one source are taken in their order; signals are applied once, in that order, when all messages of the
 *    source up to the one that carries them have come. Nothing is ordered between sources. A message of 0 bytes is its
 *    signal alone: nobody takes it. What ranks of this server and what those of others do to one signal is kept apart and
 *    added up: a set undoes what came before from its own side;
 *  - a flush ends when everything claimed before it is in the destination's memory. It does not say that it was taken.
 *
 * Slots come when the receiver has given some back: a full receiver makes puts wait, and nothing is lost. Every wait ends after
 * timeout_ns, or when the host says stop: the call returns false (or a slot or message whose addr is 0), the host finds
 * the reason in FlStatus, and the kernel should return. */
#ifndef FUSELINK_DEVICE_CUH
#define FUSELINK_DEVICE_CUH

#include "bulk.cuh"
#include "local.cuh"

/* ---- Signals: one of the receiver's counters, changed by a message ---- */

struct FlSignal {
  uint64_t number_and_op; /* as in word 0 of a doorbell; 0: no signal */
  uint64_t value;         /* 63 bits */
};

FL_FN FlSignal fl_signal_of(uint32_t signal, uint32_t op, uint64_t value) {
  return FlSignal{(uint64_t)(signal + 1) << 48 | (uint64_t)op << 12, fl_without_lap(value)};
}

/* Adds to the receiver's signal. Many sources may add to one. */
FL_FN FlSignal fl_add_to(uint32_t signal, uint64_t value) { return fl_signal_of(signal, FL_SIGNAL_ADD, value); }

/* Sets the receiver's signal. With several sources, all of its server or all of others, the last to come wins. */
FL_FN FlSignal fl_set(uint32_t signal, uint64_t value) { return fl_signal_of(signal, FL_SIGNAL_SET, value); }

FL_FN FlSignal fl_no_signal() { return FlSignal{0, 0}; }

/* ---- What all calls share ---- */

FL_FN const FlChannel* fl_channel(const FlStream* s) { return fl_at<const FlChannel>(s->channel_ptr); }

/* Refuses what cannot be. One thread. */
FL_FN bool fl_check(const FlStream* s, bool good, uint64_t which, uint64_t bytes) {
  if (!good) fl_give_up(fl_channel(s), FL_STATUS_BAD_PUT, which, bytes);
  return good;
}

/* One round of waiting. One thread. False after giving up. */
FL_FN bool fl_wait_on(const FlStream* s, FlPatience* patience, uint64_t late, uint64_t detail0, uint64_t detail1) {
  uint64_t code = fl_idle(fl_channel(s), patience, late);
  if (code != FL_STATUS_OK) fl_give_up(fl_channel(s), code, detail0, detail1);
  return code == FL_STATUS_OK;
}

/* ---- In-place production: claim a slot, write into it, send it ---- */

FL_FN FlSlot fl_claim_put_slot(const FlStream* s, uint32_t dst) {
  const FlChannel* ch = fl_channel(s);
  uint32_t queue = ch->work_queues + dst;
  if (fl_is_local(s, dst)) return fl_claim_local_slot(s, fl_at<uint64_t>(ch->queue_next_ptr) + queue, dst);
  return fl_claim_slot(ch, queue);
}

/* The next slot for `dst` if there is one now; addr is 0 if not. */
template <typename Scope>
FL_FN FlSlot fl_poll_slot(Scope scope, const FlStream* s, uint32_t dst) {
  FlSlot slot = {0, 0, 0};
  if (fl_elected(scope) && fl_check(s, dst < s->ranks, dst, 0)) slot = fl_claim_put_slot(s, dst);
  return fl_broadcast_slot(scope, slot);
}

/* The next slot for `dst`: slot_bytes at addr, aligned to 64, to be written by plain stores and then sent. Who claims a slot
 * sends it: messages behind it wait for it at the receiver. addr is 0 after giving up. */
template <typename Scope>
FL_FN FlSlot fl_wait_slot(Scope scope, const FlStream* s, uint32_t dst) {
  FlSlot slot = {0, 0, 0};
  if (fl_elected(scope) && fl_check(s, dst < s->ranks, dst, 0)) {
    FlPatience patience = fl_patience(s->timeout_ns);
    do {
      slot = fl_claim_put_slot(s, dst);
    } while (slot.addr == 0 && fl_wait_on(s, &patience, FL_STATUS_NO_SLOT, dst, slot.idx));
  }
  return fl_broadcast_slot(scope, slot);
}

/* Rings for a filled slot, or tells the receiver's kernel. One thread. False after giving up. */
FL_FN bool fl_send_filled(const FlStream* s, uint32_t dst, FlSlot slot, uint64_t bytes, FlSignal signal) {
  const FlChannel* ch = fl_channel(s);
  if (!fl_is_local(s, dst)) {
    FlDoorbell descriptor = fl_doorbell_send(s->msg_class, ch->work_queues + dst, slot.idx, bytes);
    descriptor.word[0] |= signal.number_and_op;
    descriptor.word[3] = signal.value;
    return fl_doorbell_push(ch, s->timeout_ns, descriptor);
  }
  /* Where a host does not look, at least this is refused: a slot that was sent before, and a signal that is not there. */
  uint64_t number = signal.number_and_op >> 48;
  bool good = slot.idx - fl_shown_local(s, dst) <= s->local_depth && number <= s->signals;
  if (!fl_check(s, good, number > s->signals ? number - 1 : dst, bytes)) return false;
  fl_send_local(s, dst, slot.idx, FlLocalSend{bytes, signal.number_and_op, signal.value});
  return true;
}

/* Sends the first `bytes` of a slot that the scope's threads have filled by ordinary stores, or by the bulk copy engine as
 * bulk.cuh does it. */
template <typename Scope>
FL_FN bool fl_send_with_signal(Scope scope, const FlStream* s, uint32_t dst, FlSlot slot, uint64_t bytes, FlSignal signal) {
  fl_sync(scope);
  uint64_t told = 0;
  if (fl_elected(scope) && fl_check(s, dst < s->ranks && bytes <= s->slot_bytes, dst, bytes)) {
    fl_count_stores(slot.addr, bytes);
    told = fl_send_filled(s, dst, slot, bytes, signal);
  }
  return fl_broadcast(scope, told) != 0;
}

template <typename Scope>
FL_FN bool fl_send(Scope scope, const FlStream* s, uint32_t dst, FlSlot slot, uint64_t bytes) {
  return fl_send_with_signal(scope, s, dst, slot, bytes, fl_no_signal());
}

/* ---- Puts: copy from memory of this GPU ---- */

/* Puts `bytes` from `src`, any number, as messages of slot_bytes and a last one of the rest; the last carries the signal.
 * Nothing, with a signal, is a message of 0 bytes. */
template <typename Scope>
FL_FN bool fl_put_with_signal(Scope scope, const FlStream* s, uint32_t dst, uint64_t src, uint64_t bytes, FlSignal signal) {
  for (;;) {
    FlSlot slot = fl_wait_slot(scope, s, dst);
    if (slot.addr == 0) return false;
    uint64_t part = bytes < s->slot_bytes ? bytes : s->slot_bytes;
    fl_copy(scope, slot.addr, src, part);
    src += part;
    bytes -= part;
    if (!fl_send_with_signal(scope, s, dst, slot, part, bytes == 0 ? signal : fl_no_signal())) return false;
    if (bytes == 0) return true;
  }
}

template <typename Scope>
FL_FN bool fl_put(Scope scope, const FlStream* s, uint32_t dst, uint64_t src, uint64_t bytes) {
  return bytes == 0 || fl_put_with_signal(scope, s, dst, src, bytes, fl_no_signal());
}

/* A signal by itself. */
template <typename Scope>
FL_FN bool fl_signal(Scope scope, const FlStream* s, uint32_t dst, FlSignal signal) {
  return fl_put_with_signal(scope, s, dst, 0, 0, signal);
}

/* All messages to `dst` below this one are in its memory. */
FL_FN uint64_t fl_arrived_at(const FlStream* s, uint32_t dst) {
  if (fl_is_local(s, dst)) return fl_shown_local(s, dst);
  return fl_load_relaxed_sys(fl_at<uint64_t>(s->completed_ptr) + dst);
}

/* Waits until every message to `dst` that was claimed before is in its memory. */
template <typename Scope>
FL_FN bool fl_flush(Scope scope, const FlStream* s, uint32_t dst) {
  const FlChannel* ch = fl_channel(s);
  uint64_t left = 0;
  fl_sync(scope); /* what the scope's other threads have claimed counts */
  if (fl_elected(scope) && fl_check(s, dst < s->ranks, dst, 0)) {
    FlPatience patience = fl_patience(s->timeout_ns);
    uint64_t claimed = fl_load_acquire_gpu(fl_at<uint64_t>(ch->queue_next_ptr) + ch->work_queues + dst);
    do {
      left = fl_arrived_at(s, dst) >= claimed;
    } while (left == 0 && fl_wait_on(s, &patience, FL_STATUS_NOT_FLUSHED, dst, claimed));
    fl_fence_sys(); /* the counter before whatever the caller does to its source buffers */
  }
  return fl_broadcast(scope, left) != 0;
}

/* ---- Taking messages: read in place, then give the slot back ---- */

FL_FN FlMessage fl_claim_message(const FlStream* s, uint32_t src) {
  uint64_t* next = fl_at<uint64_t>(s->taken_ptr) + src;
  if (fl_is_local(s, src)) return fl_claim_local_message(s, next, src);
  const FlArrival* ring = fl_at<FlArrival>(s->arrivals_ptr) + (uint64_t)src * s->arrival_depth;
  return fl_claim_arrival(next, fl_load_acquire_gpu(next), ring, s->arrival_depth);
}

/* The next message of `src` if it has come; addr is 0 if not. */
template <typename Scope>
FL_FN FlMessage fl_poll_message(Scope scope, const FlStream* s, uint32_t src) {
  FlMessage message = {0, 0, 0, 0, 0};
  if (fl_elected(scope) && fl_check(s, src < s->ranks, src, 0)) message = fl_claim_message(s, src);
  return fl_broadcast_message(scope, message);
}

/* The next message of `src`: `bytes` at addr, to be read by plain loads and then given back. addr is 0 after giving up. */
template <typename Scope>
FL_FN FlMessage fl_wait_message(Scope scope, const FlStream* s, uint32_t src) {
  FlMessage message = {0, 0, 0, 0, 0};
  if (fl_elected(scope) && fl_check(s, src < s->ranks, src, 0)) {
    FlPatience patience = fl_patience(s->timeout_ns);
    uint64_t* taken = fl_at<uint64_t>(s->taken_ptr) + src;
    do {
      message = fl_claim_message(s, src);
    } while (message.addr == 0 && fl_wait_on(s, &patience, FL_STATUS_NO_MESSAGE, src, fl_load_relaxed_gpu(taken)));
  }
  return fl_broadcast_message(scope, message);
}

/* Gives the slot of a message back, once all threads of the scope have read it. */
template <typename Scope>
FL_FN bool fl_give_back(Scope scope, const FlStream* s, FlMessage message) {
  fl_sync(scope);
  uint64_t told = 1;
  if (fl_elected(scope)) {
    fl_count_loads(message.addr, message.bytes);
    if (fl_is_local(s, message.src)) {
      fl_release_local(s, message);
    } else {
      told = fl_doorbell_push(fl_channel(s), s->timeout_ns, fl_doorbell_drained(message.slot));
    }
  }
  return fl_broadcast(scope, told) != 0;
}

/* ---- Waiting for signals ---- */

/* What ranks of other servers have made of a signal, which the host writes, and what those of this server have. One thread,
 * which fences behind it. */
FL_FN uint64_t fl_signal_value(const FlStream* s, uint32_t signal) {
  uint64_t value = fl_load_relaxed_sys(fl_at<uint64_t>(s->signals_ptr) + signal);
  if (s->local_ranks > 0) value += fl_load_relaxed_sys(fl_local_signal(s, s->local_rank, signal));
  return value;
}

/* The value of a signal now. Everything that the messages up to there carried may be taken. */
template <typename Scope>
FL_FN uint64_t fl_poll(Scope scope, const FlStream* s, uint32_t signal) {
  uint64_t value = 0;
  if (fl_elected(scope) && fl_check(s, signal < s->signals, signal, 0)) {
    value = fl_signal_value(s, signal);
    fl_fence_sys(); /* the signal before what it tells of */
  }
  return fl_broadcast(scope, value);
}

/* Waits until a signal is at least `value`. */
template <typename Scope>
FL_FN bool fl_wait(Scope scope, const FlStream* s, uint32_t signal, uint64_t value) {
  uint64_t reached = 0;
  if (fl_elected(scope) && fl_check(s, signal < s->signals, signal, 0)) {
    FlPatience patience = fl_patience(s->timeout_ns);
    do {
      reached = fl_signal_value(s, signal) >= value;
    } while (reached == 0 && fl_wait_on(s, &patience, FL_STATUS_NO_SIGNAL, signal, value));
    fl_fence_sys(); /* as in fl_poll */
  }
  return fl_broadcast(scope, reached) != 0;
}

/* Waits until a signal has grown by `count` since the last call for it: what a replayed graph needs, whose arguments
 * cannot change. One waiter per signal at a time. */
template <typename Scope>
FL_FN bool fl_wait_more(Scope scope, const FlStream* s, uint32_t signal, uint64_t count) {
  uint64_t* seen = fl_at<uint64_t>(s->seen_ptr) + signal;
  uint64_t due = count;
  if (signal < s->signals) due += fl_broadcast(scope, fl_load_relaxed_gpu(seen));
  if (!fl_wait(scope, s, signal, due)) return false;
  if (fl_elected(scope)) fl_store_relaxed_gpu(seen, due);
  return true;
}

#endif
