/* Layouts shared by kernels, host and other languages. Plain C11, no pointers: an address is a uint64_t, and its
 * name says whose address space it is in. host/abi.rs is generated from this file.
 *
 * Words that one side polls while the other writes them carry a *lap bit* (bit 63): it flips each time a ring
 * wraps, so a reader tells a fresh word from the one of the lap before without any index being exchanged, and a
 * descriptor of several words is complete when each of its words shows the lap that is due. A torn store is thus
 * seen as "not there yet". The first lap is written as 1, so that zeroed memory is an empty ring. */
#ifndef FUSELINK_ABI_H
#define FUSELINK_ABI_H

#include <stdint.h>

#ifdef __cplusplus
#define FL_STATIC_ASSERT static_assert
#else
#define FL_STATIC_ASSERT _Static_assert
#endif

#define FL_ABI_VERSION 3u
#define FL_LAP_SHIFT 63
#define FL_NO_NIC 0xffffu
#define FL_NO_TRANSFER 0xffffffffu

/* ---- Doorbell: a kernel's word to the host (ring in host-mapped memory, many producers, one consumer) ---- */

/* Operations, and where the fields of a descriptor lie:
 *   word 0: op (8 bits) | class << 8 (4) | FlSignalOp << 12 (4) | queue << 16 (32) | (signal + 1) << 48 (15), 0: none
 *   word 1: index in the queue, or slot                         word 2: payload bytes, or NIC of the slot
 *   word 3: the signal's value
 * 63 bits each, so offsets and counts are never cut to 32. */
enum FlOp {
  FL_OP_SEND = 1,    /* the armed slot of (queue, index) is filled: send it */
  FL_OP_DRAINED = 2, /* the arrived slot (word 1) beside NIC (word 2) has been read: it may be lent again */
};

/* What the receiver's host does to a signal when the message that carries it, and all before it, have come. */
enum FlSignalOp { FL_SIGNAL_ADD = 0, FL_SIGNAL_SET = 1 };

#define FL_SIGNAL_BITS 15
#define FL_MAX_SIGNALS ((1u << FL_SIGNAL_BITS) - 1)

/* Classes have slots, credits and lanes of their own, so that none can starve another. */
enum FlClass {
  FL_CLASS_PLAN = 0,        /* messages of a schedule, credited when their transfer's turn comes */
  FL_CLASS_PUT = 1,         /* calls without a schedule: credits stand */
  FL_CLASS_LOW_LATENCY = 2, /* one-sided puts of users' kernels: credits stand, and slots are armed ahead */
  FL_CLASSES = 3,
};

typedef struct FlDoorbell {
  uint64_t word[4];
} FlDoorbell;

/* A ring as its producers see it. capacity is a power of two. */
typedef struct FlRing {
  uint64_t entries_ptr;  /* FlDoorbell[capacity], host-mapped */
  uint64_t prod_idx_ptr; /* uint64_t, device memory: next index to claim */
  uint64_t cons_idx_ptr; /* uint64_t, host-mapped: everything below has been read by the host */
  uint64_t capacity;
} FlRing;

/* ---- Armed slots: the host's word to a kernel that sends (rings, one per queue) ----
 *
 * The host decides what goes next, since it knows credits, NICs and turns; a kernel fills whatever is armed, in the
 * order of its queue, and never waits for one message while another could go. Queues 0 .. work_queues - 1 serve
 * kernels that walk a PlanTable; queue work_queues + r serves those that put to rank r. */

typedef struct FlArmedSlot {
  uint64_t dev_addr; /* | lap: where the kernel writes the message */
  uint64_t message;  /* | lap: for a walk, piece (in FlPlanSend) << 32 | which of its messages; for a put, its index */
} FlArmedSlot;

/* ---- Arrivals: the host's word to a kernel that receives (for calls one ring per rank, in order of arrival; for streams
 * one per source, in order of sequence) ---- */

typedef struct FlArrival {
  uint64_t dev_addr;  /* | lap: where the message lies */
  uint64_t seq;       /* | lap: which message of its source it is, from 0 in this call or in the stream's life */
  uint64_t src_bytes; /* | lap: source rank << 32 | payload bytes */
  uint64_t slot;      /* | lap: class << 60 | NIC << 32 | slot: what FL_OP_DRAINED gives back */
} FlArrival;

/* ---- Streams within a server: kernel to kernel, in memory of the GPUs (local.cuh) ---- */

/* Places of such a stream at most: slots, arrivals, messages on their way out. */
#define FL_LOCAL_DEPTH 16
/* Where the number begins in FlLocalEnd.front. */
#define FL_LOCAL_FRONT_SHIFT 17
FL_STATIC_ASSERT(FL_LOCAL_FRONT_SHIFT > FL_LOCAL_DEPTH, "a bit for the message in the slot of the one that is being shown");

/* A message of another rank of the server, or of this one; it lies in the slot of its sequence. */
typedef struct FlLocalArrival {
  uint64_t seq;   /* | lap */
  uint64_t bytes; /* | lap */
} FlLocalArrival;

/* A filled slot, until it is shown to the receiver. */
typedef struct FlLocalSend {
  uint64_t bytes;
  uint64_t signal; /* number and operation as in word 0 of a doorbell; 0: none */
  uint64_t value;
} FlLocalSend;

/* What a GPU keeps of the two streams between its rank and another one of the server. One for each, then the signals that
 * ranks of the server have changed, then slots: the same layout on every GPU. */
typedef struct FlLocalEnd {
  FlLocalArrival inbox[FL_LOCAL_DEPTH]; /* written by the other rank: what it has sent here */
  uint64_t released[FL_LOCAL_DEPTH];    /* written by the other rank, by slot: 1 + the last message that it gave back */
  FlLocalSend sends[FL_LOCAL_DEPTH];    /* from here on this GPU's alone: messages to the other rank */
  uint64_t front;                       /* message to be shown next << FL_LOCAL_FRONT_SHIFT | which behind it are filled */
  uint64_t shown;                       /* arrivals ever written there */
  uint64_t reserved[6];
} FlLocalEnd;

/* ---- Credits: a receiver's word to a sender (one line per receiver and ingress NIC, written by RDMA) ---- */

/* ring[p % FL_CREDIT_RING] = lap | (transfer + 1) << 32 | (NIC + 1) << 20 | epoch << 12 | slot for the p-th credit ever
 * granted on this line; transfer part 0: for messages outside of transfers; NIC part: the NIC that the credit stands for
 * when that one cannot be reached, 0: its own; epoch: how often the slot was lent, modulo 256. A word is absolute: writing
 * it again changes nothing.
 * state = call << 8 | FlNicState + 1: how the receiver's NIC fares during that call; 0 says nothing. Only lines of the
 * put class use it.
 * Credits before recalled are to be returned unused: the slots' memory is asked back.
 * memory_*: where the slots lie and the key to write there, when they were lent after the start (memory_bytes != 0); told
 * ahead of the first credit, and the same until all credits are back.
 * After a path to the NIC was closed: credits before called_in that were not used are void, arrived has for each
 * of the line's 8 slots at most, 8 bits each from the lowest, the epoch of the last message that came, and answer = fence. */
#define FL_CREDIT_RING 16
typedef struct FlCreditLine {
  uint64_t state;
  uint64_t called_in;
  uint64_t answer;
  uint64_t recalled;
  uint64_t memory_addr;
  uint64_t memory_rkey;
  uint64_t memory_bytes;
  uint64_t arrived;
  uint64_t ring[FL_CREDIT_RING];
} FlCreditLine;

enum FlNicState { FL_NIC_IDLE = 0, FL_NIC_BUSY = 1, FL_NIC_LEASED = 2, FL_NIC_DOWN = 3 };

/* ---- Signals on their way (one ring per source and destination, in the segment of the destination's server) ----
 *
 * Message seq of a stream, if it carries a signal, has it in entry seq modulo the ring's length, which is written by RDMA
 * ahead of the message and on its path, each time the message is sent. word 0: number + 1 (15 bits) | FlSignalOp << 15 | seq << 16 (47
 * bits); word 1: value. An entry of another sequence is none. */
typedef struct FlSignalEntry {
  uint64_t what;
  uint64_t value;
} FlSignalEntry;

/* ---- Immediate of a write: class, destination GPU, slot, sequence (from the top bit down) ---- */

#define FL_IMM_CLASS_BITS 2
#define FL_IMM_GPU_BITS 6
#define FL_IMM_SLOT_BITS 12
#define FL_IMM_SEQ_BITS 12
FL_STATIC_ASSERT(FL_IMM_CLASS_BITS + FL_IMM_GPU_BITS + FL_IMM_SLOT_BITS + FL_IMM_SEQ_BITS == 32, "immediate is 32 bits");

/* ---- PlanTable: what one rank does in one all-to-all. One block of memory; offsets count from its start ---- */

#define FL_PLAN_MAGIC 0x464c504cu /* "FLPL" */
#define FL_PLAN_VERSION 1u

typedef struct FlPlanHeader {
  uint32_t magic;
  uint32_t version;
  uint32_t rank;
  uint32_t ranks;
  uint32_t first_local_rank; /* ranks of this server are first_local_rank .. + local_ranks */
  uint32_t local_ranks;
  uint32_t msg_class; /* FlClass of every message of the table */
  uint32_t lanes;     /* FlPlanLane at lane_offset */
  uint32_t sends;     /* FlPlanSend at send_offset, lane by lane, by transfer */
  uint32_t recvs;     /* FlPlanRecv at recv_offset, source by source, by first_seq */
  uint32_t locals;    /* FlPlanLocal at local_offset */
  uint32_t turns;     /* FlPlanTurn at turn_offset, in list order per NIC and direction */
  uint64_t message_bytes;
  uint64_t send_messages;
  uint64_t recv_messages;
  uint64_t plan_hash; /* of the whole schedule: the same on every rank */
  uint64_t lane_offset;
  uint64_t send_offset;
  uint64_t recv_index_offset; /* uint32_t[ranks + 1]: recvs of source r are recv_index[r] .. recv_index[r + 1] */
  uint64_t recv_offset;
  uint64_t local_offset;
  uint64_t turn_offset;
  uint64_t table_bytes;
} FlPlanHeader;

/* Pieces that leave by one NIC (plans), or for one destination (all else). Lanes do not wait for each other. */
typedef struct FlPlanLane {
  uint32_t lane; /* plans: the NIC; else NICs of the server + destination rank */
  uint32_t first_send;
  uint32_t sends;
  uint32_t messages;
} FlPlanLane;

/* A piece that leaves: bytes [offset, offset + bytes) of this rank's cell for dst, cut into messages of
 * message_bytes; the i-th of them has sequence first_seq + i among all messages from this rank to dst. */
typedef struct FlPlanSend {
  uint64_t offset;
  uint64_t bytes;
  uint32_t dst;
  uint32_t first_seq;
  uint32_t transfer; /* FL_NO_TRANSFER: loose */
  uint16_t egress;   /* NIC of this server; FL_NO_NIC: the engine chooses */
  uint16_t ingress;  /* NIC of the destination's server, likewise */
} FlPlanSend;

/* A piece that arrives: the same, seen from its destination. */
typedef struct FlPlanRecv {
  uint64_t offset;
  uint64_t bytes;
  uint32_t src;
  uint32_t first_seq;
  uint32_t transfer;
  uint16_t egress;
  uint16_t ingress;
} FlPlanRecv;

/* A cell that stays in the server. */
typedef struct FlPlanLocal {
  uint64_t bytes;
  uint32_t dst;
  uint32_t reserved;
} FlPlanLocal;

/* What one transfer moves over one NIC that this rank owns; the NIC's transfers take turns in list order. */
typedef struct FlPlanTurn {
  uint32_t transfer;
  uint32_t peer_server;
  uint16_t nic;
  uint16_t direction; /* 0 egress, 1 ingress */
  uint32_t messages;
  uint64_t bytes;
} FlPlanTurn;

/* ---- What kernels are launched with ---- */

/* A GPU's standing resources. Lives in device-readable memory; filled once. */
typedef struct FlChannel {
  uint32_t rank;
  uint32_t doorbell_rings;
  uint32_t work_queues;
  uint32_t armed_depth;      /* armed slots per queue, a power of two */
  uint32_t arrival_capacity; /* a power of two */
  uint32_t local_ranks;
  uint64_t doorbell_rings_ptr; /* FlRing[doorbell_rings] */
  uint64_t armed_ptr;          /* FlArmedSlot[queues][armed_depth], host-mapped */
  uint64_t queue_next_ptr;     /* uint64_t[queues], device memory: slots ever filled of each queue */
  uint64_t arrivals_ptr;       /* FlArrival[arrival_capacity], host-mapped */
  uint64_t arrival_next_ptr;   /* uint64_t, device memory: next arrival to claim */
  uint64_t flags_ptr;          /* FlPeerFlags[local_ranks] on this GPU, one written by each local rank */
  uint64_t peer_flags_ptr;     /* uint64_t[local_ranks]: where this rank's flags lie on each local GPU */
  uint64_t abort_ptr;          /* uint64_t, host-mapped: not 0 = give up */
  uint64_t status_ptr;         /* FlStatus, host-mapped */
} FlChannel;

/* Absolute values: the number of the all-to-all for which a local peer is ready to be written to, or has written. */
typedef struct FlPeerFlags {
  uint64_t ready;
  uint64_t done;
} FlPeerFlags;

enum FlStatusCode {
  FL_STATUS_OK = 0,
  FL_STATUS_ABORTED = 1,
  FL_STATUS_NO_ARMED_SLOT = 2, /* detail: messages sent, messages to send */
  FL_STATUS_NO_ARRIVAL = 3,    /* detail: messages drained, messages expected */
  FL_STATUS_RING_FULL = 4,     /* detail: ring, index */
  FL_STATUS_PEER_SILENT = 5,   /* detail: local rank, call */
  FL_STATUS_BAD_ARRIVAL = 6,   /* detail: source, sequence */
  FL_STATUS_BAD_MESSAGE = 7,   /* detail: queue, message word */
  FL_STATUS_NO_SLOT = 8,       /* detail: destination, index of the message */
  FL_STATUS_NO_MESSAGE = 9,    /* detail: source, sequence */
  FL_STATUS_NO_SIGNAL = 10,    /* detail: signal, value waited for */
  FL_STATUS_NOT_FLUSHED = 11,  /* detail: destination, messages that should have left */
  FL_STATUS_BAD_PUT = 12,      /* detail: destination, source or signal that is not there; or bytes past the slot */
};

/* Why a kernel gave up; the first block to say so wins. */
typedef struct FlStatus {
  uint64_t code;
  uint64_t detail[2];
} FlStatus;

/* FL_LOCAL_BY_HOST: copy engines move the cells that stay in the server, and say so in the done flags; the kernel moves the
 * others only. */
enum FlAllToAllOption { FL_LOCAL_BY_HOST = 1 };

/* One all-to-all(v). Per-call numbers live here, in device memory, so that a captured launch can be replayed. */
typedef struct FlAllToAll {
  uint64_t channel_ptr;    /* FlChannel */
  uint64_t table_ptr;      /* FlPlanHeader and what follows it */
  uint64_t send_ptr;       /* this rank's send buffer */
  uint64_t recv_ptr;       /* this rank's receive buffer */
  uint64_t send_at_ptr;    /* uint64_t[ranks]: where the cell for each rank starts in the send buffer */
  uint64_t recv_at_ptr;    /* uint64_t[ranks]: where the cell from each rank starts in the receive buffer */
  uint64_t peer_recv_ptr;  /* uint64_t[local_ranks]: each local peer's receive buffer, as this GPU sees it */
  uint64_t peer_at_ptr;    /* uint64_t[local_ranks]: where this rank's cell starts in it */
  uint64_t call;           /* number of this all-to-all, from 1 */
  uint64_t options;        /* FlAllToAllOption, added up */
  uint64_t timeout_ns;     /* longest time without progress */
  uint64_t sent;           /* scratch: messages sent by all blocks */
  uint64_t drained;        /* scratch: messages drained by all blocks */
  uint64_t local_next;     /* scratch: next local chunk to claim */
  uint64_t local_done;     /* scratch: local chunks written by all blocks */
} FlAllToAll;

/* What a user's kernel is given for one-sided puts (device.cuh): this rank's ends of the streams to and from all ranks.
 * Nothing in it changes from launch to launch, so it may be captured in a graph. */
typedef struct FlStream {
  uint64_t channel_ptr;   /* FlChannel */
  uint64_t slot_bytes;    /* longest message */
  uint64_t timeout_ns;    /* longest wait */
  uint32_t msg_class;
  uint32_t ranks;
  uint32_t arrival_depth; /* arrivals per source, a power of two */
  uint32_t signals;
  uint64_t arrivals_ptr;  /* FlArrival[ranks][arrival_depth], host-mapped */
  uint64_t taken_ptr;     /* uint64_t[ranks], device memory: messages ever taken of each source */
  uint64_t completed_ptr; /* uint64_t[ranks], host-mapped: all messages to a rank below this are in its memory */
  uint64_t signals_ptr;   /* uint64_t[signals], host-mapped: absolute values */
  uint64_t seen_ptr;      /* uint64_t[signals], device memory: how much of each signal waits have used up */
  uint64_t local_ends_ptr;       /* uint64_t[local_ranks], device memory: where each one's FlLocalEnd[local_ranks] are */
  uint64_t local_signals_offset; /* uint64_t[signals], from there */
  uint64_t local_slots_offset;   /* slot_bytes[local_ranks][local_depth], from there; the first index is the source */
  uint32_t first_local_rank;     /* ranks of this server are first_local_rank .. + local_ranks */
  uint32_t local_ranks;          /* 0: streams to other servers only */
  uint32_t local_rank;           /* this one among them */
  uint32_t local_depth;          /* a power of two, at most FL_LOCAL_DEPTH */
} FlStream;

/* Bytes in a buffer to one peer, message by message (put.cu), or from one (take). */
typedef struct FlPut {
  uint64_t channel_ptr;
  uint64_t data_ptr;
  uint64_t bytes;
  uint64_t message_bytes;
  uint32_t peer; /* destination, or source */
  uint32_t msg_class;
  uint64_t timeout_ns;
  uint64_t next;  /* scratch, 0 between launches: next message to claim (put), blocks that have ended (take) */
  uint64_t moved; /* scratch, 0 between launches: messages done by all blocks */
} FlPut;

FL_STATIC_ASSERT(sizeof(FlDoorbell) == 32, "two descriptors per cache line");
FL_STATIC_ASSERT(sizeof(FlRing) == 32, "FlRing");
FL_STATIC_ASSERT(sizeof(FlArmedSlot) == 16, "one 16-byte load");
FL_STATIC_ASSERT(sizeof(FlArrival) == 32, "FlArrival");
FL_STATIC_ASSERT(sizeof(FlLocalArrival) == 16, "FlLocalArrival");
FL_STATIC_ASSERT(sizeof(FlLocalSend) == 24, "FlLocalSend");
FL_STATIC_ASSERT(sizeof(FlLocalEnd) == 832, "whole lines of 64 bytes");
FL_STATIC_ASSERT(sizeof(FlCreditLine) == 192, "FlCreditLine");
FL_STATIC_ASSERT(sizeof(FlSignalEntry) == 16, "one inline write");
FL_STATIC_ASSERT(sizeof(FlPlanHeader) == 136, "FlPlanHeader");
FL_STATIC_ASSERT(sizeof(FlPlanLane) == 16, "FlPlanLane");
FL_STATIC_ASSERT(sizeof(FlPlanSend) == 32, "FlPlanSend");
FL_STATIC_ASSERT(sizeof(FlPlanRecv) == 32, "FlPlanRecv");
FL_STATIC_ASSERT(sizeof(FlPlanLocal) == 16, "FlPlanLocal");
FL_STATIC_ASSERT(sizeof(FlPlanTurn) == 24, "FlPlanTurn");
FL_STATIC_ASSERT(sizeof(FlChannel) == 96, "FlChannel");
FL_STATIC_ASSERT(sizeof(FlPeerFlags) == 16, "FlPeerFlags");
FL_STATIC_ASSERT(sizeof(FlStatus) == 24, "FlStatus");
FL_STATIC_ASSERT(sizeof(FlAllToAll) == 120, "FlAllToAll");
FL_STATIC_ASSERT(sizeof(FlStream) == 120, "FlStream");
FL_STATIC_ASSERT(sizeof(FlPut) == 64, "FlPut");

#endif
