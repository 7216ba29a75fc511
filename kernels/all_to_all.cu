/* All-to-all(v): one rank's walk through its PlanTable.
 *
 * A block goes round three kinds of work and takes one step of each that is ready: drain an arrived message, fill an
 * armed slot, write one chunk to a local peer. So any blocks of the grid make progress, one included, in any order of
 * execution, however few are resident:
 *   - no step is reserved for a block that may not run: arrivals, armed slots and chunks are claimed by whoever comes, a slot
 *     and an arrival only when it is there, and every block says for the rank that it is ready;
 *   - no step waits for another kind. Draining needs only arrivals, and gives slots back, which is what other servers'
 *     senders wait for; sending needs an armed slot, which comes when a receiver has granted a credit, hence has
 *     drained; a chunk that is claimed before its peer is ready stays with its block, which goes round meanwhile, and a
 *     block does not end while it holds one;
 *   - a peer's ready flag is set by the first of its blocks that runs, before anything else;
 *   - a block ends only when all of the rank's work is done, so one that starts later finds nothing to do.
 * The one wait inside a step, for room in the doorbell ring, ends because the host always empties the ring. Every
 * wait is bounded: no progress for timeout_ns, or the host's abort word, ends the kernel with a status. */

#include "plan.cuh"
#include "relay.cuh"

struct Walk {
  FlAllToAll* call;
  const FlChannel* ch;
  const FlPlanHeader* table;
  FlPatience patience;
  uint64_t local_chunks;
  uint64_t pending_local; /* chunk claimed by this block whose peer is not ready; local_chunks = none */
  bool failed;
};

FL_FN void fail(Walk* w, uint64_t code, uint64_t detail0, uint64_t detail1) {
  if (fl_elected()) fl_give_up(w->ch, code, detail0, detail1);
  w->failed = true;
}

FL_FN FlPeerFlags* peer_flags(const Walk* w, uint32_t local_rank) {
  return fl_at<FlPeerFlags>(fl_at<uint64_t>(w->ch->peer_flags_ptr)[local_rank]);
}

FL_FN FlPeerFlags* own_flags(const Walk* w, uint32_t local_rank) {
  return fl_at<FlPeerFlags>(w->ch->flags_ptr) + local_rank;
}

FL_FN void announce_ready(const Walk* w) {
  for (uint32_t i = 0; i < w->ch->local_ranks; ++i) {
    fl_store_release_sys(&peer_flags(w, i)->ready, w->call->call);
  }
}

FL_FN void announce_done(const Walk* w) {
  fl_fence_sys(); /* all blocks' chunks, ordered by local_done, before the flags */
  for (uint32_t i = 0; i < w->ch->local_ranks; ++i) {
    fl_store_release_sys(&peer_flags(w, i)->done, w->call->call);
  }
}

/* ---- drain ---- */

FL_FN bool drain_one(Walk* w) {
  FlMessage claim = {0, 0, 0, 0, 0};
  if (fl_elected()) claim = fl_next_arrival(w->ch);
  claim = fl_broadcast_message(FlBlockScope(), claim);
  if (claim.addr == 0) return false;
  const FlPlanHeader* t = w->table;
  const FlPlanRecv* piece = fl_plan_find_recv(t, claim.src, claim.seq);
  uint64_t part = piece ? claim.seq - piece->first_seq : 0;
  if (piece == nullptr || fl_message_bytes(piece->bytes, t->message_bytes, part) != claim.bytes || claim.bytes == 0) {
    fail(w, FL_STATUS_BAD_ARRIVAL, claim.src, claim.seq);
    return false;
  }
  uint64_t at = fl_at<uint64_t>(w->call->recv_at_ptr)[claim.src] + piece->offset + part * t->message_bytes;
  if (!fl_drain_message(w->ch, w->call->timeout_ns, claim, w->call->recv_ptr + at)) w->failed = true;
  if (fl_elected()) fl_add_acq_rel_gpu(&w->call->drained, 1);
  return true;
}

/* ---- send ---- */

FL_FN bool send_from(Walk* w, uint32_t queue) {
  FlSlot slot = {0, 0, 0};
  if (fl_elected()) slot = fl_claim_slot(w->ch, queue);
  slot = fl_broadcast_slot(FlBlockScope(), slot);
  if (slot.addr == 0) return false;
  uint32_t send = (uint32_t)(slot.message >> 32), part = (uint32_t)slot.message;
  const FlPlanHeader* t = w->table;
  const FlPlanSend* piece = fl_plan_sends(t) + send;
  uint64_t bytes = send < t->sends ? fl_message_bytes(piece->bytes, t->message_bytes, part) : 0;
  if (bytes == 0) {
    fail(w, FL_STATUS_BAD_MESSAGE, queue, slot.message);
    return false;
  }
  uint64_t at = fl_at<uint64_t>(w->call->send_at_ptr)[piece->dst] + piece->offset + part * t->message_bytes;
  fl_block_copy(slot.addr, w->call->send_ptr + at, bytes);
  FlDoorbell descriptor = fl_doorbell_send(t->msg_class, queue, slot.idx, bytes);
  if (!fl_ring(FlBlockScope(), w->ch, w->call->timeout_ns, descriptor)) w->failed = true;
  if (fl_elected()) fl_add_acq_rel_gpu(&w->call->sent, 1);
  return true;
}

/* A block looks at one queue more often than at the others, so that blocks spread over them; at one of the others each
 * round, since the block whose queue that is may not run. Two looks a round: each is a read of host memory. */
FL_FN bool send_one(Walk* w, uint32_t round) {
  uint32_t queues = w->ch->work_queues;
  if (queues == 0) return false;
  uint32_t own = fl_block_idx() % queues;
  if (send_from(w, own)) return true;
  uint32_t other = (own + round % queues) % queues;
  return !w->failed && other != own && send_from(w, other);
}

/* ---- local ---- */

struct LocalChunk {
  uint32_t dst;
  uint64_t offset;
  uint64_t bytes;
};

/* Which bytes a local chunk is. The walk starts at this rank's own cell, so that peers are written to in rotation. */
FL_FN LocalChunk find_local(const FlPlanHeader* t, uint64_t chunk) {
  const FlPlanLocal* locals = fl_plan_locals(t);
  uint32_t first = 0;
  while (first < t->locals && locals[first].dst < t->rank) first += 1;
  for (uint32_t n = 0; n < t->locals; ++n) {
    const FlPlanLocal* cell = locals + (first + n) % t->locals;
    uint64_t chunks = fl_messages(cell->bytes, t->message_bytes);
    if (chunk < chunks) {
      return LocalChunk{cell->dst, chunk * t->message_bytes, fl_message_bytes(cell->bytes, t->message_bytes, chunk)};
    }
    chunk -= chunks;
  }
  return LocalChunk{0, 0, 0};
}

FL_FN uint64_t claim_local(Walk* w) {
  if (w->pending_local != w->local_chunks) return w->pending_local;
  if (fl_load_relaxed_gpu(&w->call->local_next) >= w->local_chunks) return w->local_chunks;
  uint64_t chunk = fl_add_acq_rel_gpu(&w->call->local_next, 1);
  return chunk < w->local_chunks ? chunk : w->local_chunks;
}

FL_FN bool local_one(Walk* w) {
  if (w->local_chunks == 0) return false;
  uint64_t chunk = fl_broadcast(fl_elected() ? claim_local(w) : 0);
  w->pending_local = chunk;
  if (chunk == w->local_chunks) return false;
  LocalChunk c = find_local(w->table, chunk);
  uint32_t peer = c.dst - w->table->first_local_rank;
  uint64_t ready = 0;
  if (fl_elected()) {
    ready = fl_load_relaxed_sys(&own_flags(w, peer)->ready);
    fl_fence_sys(); /* the peer's buffer is ours to write from its ready flag on; the broadcast hands that on */
  }
  if (fl_broadcast(ready) < w->call->call) return false;
  uint64_t src = w->call->send_ptr + fl_at<uint64_t>(w->call->send_at_ptr)[c.dst] + c.offset;
  uint64_t dst = fl_at<uint64_t>(w->call->peer_recv_ptr)[peer] + fl_at<uint64_t>(w->call->peer_at_ptr)[peer] + c.offset;
  fl_block_copy(dst, src, c.bytes);
  fl_block_sync();
  w->pending_local = w->local_chunks;
  if (fl_elected()) {
    fl_fence_sys();
    if (fl_add_acq_rel_gpu(&w->call->local_done, 1) + 1 == w->local_chunks) announce_done(w);
  }
  return true;
}

/* The local peer that is not ready to be written to, or local_ranks. Elected thread. */
FL_FN uint32_t unready_peer(const Walk* w) {
  uint32_t i = 0;
  while (i < w->ch->local_ranks && fl_load_relaxed_sys(&own_flags(w, i)->ready) >= w->call->call) i += 1;
  return i;
}

/* The local peer that has not finished writing to this rank, or local_ranks. Elected thread. */
FL_FN uint32_t unfinished_peer(const Walk* w) {
  for (uint32_t i = 0; i < w->ch->local_ranks; ++i) {
    if (fl_load_relaxed_sys(&own_flags(w, i)->done) < w->call->call) return i;
  }
  fl_fence_sys(); /* peers' bytes are visible from their done flags on */
  return w->ch->local_ranks;
}

/* ---- the walk ---- */

/* What the kernel still waits for, as a status: OK when it is finished. Elected thread. */
FL_FN uint64_t waits_for(const Walk* w, uint64_t* detail0, uint64_t* detail1) {
  uint64_t sent = fl_load_relaxed_gpu(&w->call->sent);
  if (sent < w->table->send_messages) {
    *detail0 = sent;
    *detail1 = w->table->send_messages;
    return FL_STATUS_NO_ARMED_SLOT;
  }
  uint64_t drained = fl_load_relaxed_gpu(&w->call->drained);
  if (drained < w->table->recv_messages) {
    *detail0 = drained;
    *detail1 = w->table->recv_messages;
    return FL_STATUS_NO_ARRIVAL;
  }
  bool written = fl_load_relaxed_gpu(&w->call->local_done) == w->local_chunks;
  *detail0 = written ? unfinished_peer(w) : unready_peer(w);
  *detail1 = w->call->call;
  return written && *detail0 == w->ch->local_ranks ? FL_STATUS_OK : FL_STATUS_PEER_SILENT;
}

/* A block that is never idle looks for the host's word this often. */
#define FL_ABORT_EVERY 16

FL_FN bool is_aborted(const Walk* w) {
  uint64_t aborted = 0;
  if (fl_elected()) aborted = fl_load_relaxed_sys(fl_at<uint64_t>(w->ch->abort_ptr));
  if (fl_broadcast(aborted) == 0) return false;
  if (fl_elected()) fl_give_up(w->ch, FL_STATUS_ABORTED, 0, 0);
  return true;
}

/* Goes on (true) or ends the block. */
FL_FN bool idle_or_finish(Walk* w, uint64_t* seen) {
  uint64_t code = FL_STATUS_OK, finished = 0;
  if (fl_elected()) {
    uint64_t detail0 = 0, detail1 = 0;
    uint64_t waiting = waits_for(w, &detail0, &detail1);
    finished = waiting == FL_STATUS_OK;
    uint64_t others = fl_load_relaxed_gpu(&w->call->sent) + fl_load_relaxed_gpu(&w->call->drained) +
                      fl_load_relaxed_gpu(&w->call->local_done);
    if (others != *seen) fl_progress(&w->patience);
    *seen = others;
    if (!finished) code = fl_idle(w->ch, &w->patience, waiting);
    if (code != FL_STATUS_OK) fl_give_up(w->ch, code, detail0, detail1);
  }
  return fl_broadcast(finished != 0 || code != FL_STATUS_OK) == 0;
}

/* Two blocks of the host's size (host/cuda/kernels.rs) share a multiprocessor: one fills while the other drains. */
FL_BOUNDED_KERNEL(fl_all_to_all, FlAllToAll, 512, 2) {
  Walk w;
  w.call = p;
  w.ch = fl_at<const FlChannel>(p->channel_ptr);
  w.table = fl_at<const FlPlanHeader>(p->table_ptr);
  w.patience = fl_patience(p->timeout_ns);
  bool local_by_host = (p->options & FL_LOCAL_BY_HOST) != 0;
  w.local_chunks = local_by_host ? 0 : fl_plan_local_chunks(w.table);
  w.pending_local = w.local_chunks;
  w.failed = false;
  if (fl_elected()) { /* every block: the value is the same, and any of them may be the first to run */
    announce_ready(&w);
    if (w.local_chunks == 0 && !local_by_host) announce_done(&w);
  }
  fl_block_sync();
  uint64_t seen = 0;
  for (uint32_t round = 1; !w.failed; ++round) {
    if (round % FL_ABORT_EVERY == 0 && is_aborted(&w)) return;
    bool moved = drain_one(&w);
    if (!w.failed) moved |= send_one(&w, round);
    if (!w.failed) moved |= local_one(&w);
    if (moved) {
      fl_progress(&w.patience);
    } else if (!idle_or_finish(&w, &seen)) {
      return;
    }
  }
}
