//! The table that a kernel walks: abi.h's `FlPlanHeader` and its arrays in one block, written and read by field.
//!
//! Offsets are multiples of 8 and the arrays follow each other in one fixed order, so a table has one valid layout;
//! [`PlanTable::parse`] accepts no other. Fields are little-endian, as on every machine with a GPU.

use std::ops::Range;

use super::TableError;
use super::compile::Parts;
use crate::abi::{
    FL_CLASSES, FL_PLAN_MAGIC, FL_PLAN_VERSION, FlPlanHeader, FlPlanLane, FlPlanLocal, FlPlanRecv,
    FlPlanSend, FlPlanTurn,
};
use crate::topo::{Cluster, NicIdx, Rank};

/// The lane of messages that leave by a NIC in their turn.
pub fn plan_lane(egress: NicIdx) -> u32 {
    egress.0
}

/// The lane of messages to a peer under standing credits: behind the lanes of the own server's NICs.
pub fn put_lane(cluster: &Cluster, own: Rank, dst: Rank) -> u32 {
    cluster.server(cluster.server_of(own)).nics.len() as u32 + dst.0
}

/// What one rank does in one all-to-all, ready to be copied to memory aligned to 8 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlanTable {
    /// Never shorter than a header.
    bytes: Vec<u8>,
}

/// A structure of abi.h as bytes.
trait Record: Sized {
    const BYTES: usize;
    fn write(&self, out: &mut Vec<u8>);
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! record {
    ($name:ident { $($field:ident: $kind:ty),* $(,)? }) => {
        impl Record for $name {
            const BYTES: usize = size_of::<$name>();

            fn write(&self, out: &mut Vec<u8>) {
                let (mut record, mut at) = ([0; size_of::<$name>()], 0);
                $(
                    record[at..at + size_of::<$kind>()].copy_from_slice(&self.$field.to_le_bytes());
                    at += size_of::<$kind>();
                )*
                debug_assert_eq!(at, Self::BYTES, "fields without gaps, in the order of abi.h");
                out.extend_from_slice(&record);
            }

            fn read(bytes: &[u8]) -> Self {
                let mut at = 0;
                $(
                    let mut field = [0; size_of::<$kind>()];
                    field.copy_from_slice(&bytes[at..at + size_of::<$kind>()]);
                    at += field.len();
                    let $field = <$kind>::from_le_bytes(field);
                )*
                debug_assert_eq!(at, Self::BYTES, "fields without gaps, in the order of abi.h");
                Self { $($field),* }
            }
        }
    };
}

record!(FlPlanHeader {
    magic: u32,
    version: u32,
    rank: u32,
    ranks: u32,
    first_local_rank: u32,
    local_ranks: u32,
    msg_class: u32,
    lanes: u32,
    sends: u32,
    recvs: u32,
    locals: u32,
    turns: u32,
    message_bytes: u64,
    send_messages: u64,
    recv_messages: u64,
    plan_hash: u64,
    lane_offset: u64,
    send_offset: u64,
    recv_index_offset: u64,
    recv_offset: u64,
    local_offset: u64,
    turn_offset: u64,
    table_bytes: u64,
});
record!(FlPlanLane { lane: u32, first_send: u32, sends: u32, messages: u32 });
record!(FlPlanSend {
    offset: u64,
    bytes: u64,
    dst: u32,
    first_seq: u32,
    transfer: u32,
    egress: u16,
    ingress: u16
});
record!(FlPlanRecv {
    offset: u64,
    bytes: u64,
    src: u32,
    first_seq: u32,
    transfer: u32,
    egress: u16,
    ingress: u16
});
record!(FlPlanLocal { bytes: u64, dst: u32, reserved: u32 });
record!(FlPlanTurn { transfer: u32, peer_server: u32, nic: u16, direction: u16, messages: u32, bytes: u64 });

/// Places everything in a header that has its counts. `None` when it does not fit 64 bits.
fn lay_out(header: &mut FlPlanHeader) -> Option<()> {
    let mut at = FlPlanHeader::BYTES as u64;
    let mut place = |count: u64, size: usize| {
        let offset = at;
        at = at.checked_add(count.checked_mul(size as u64)?.checked_next_multiple_of(8)?)?;
        Some(offset)
    };
    header.lane_offset = place(header.lanes.into(), FlPlanLane::BYTES)?;
    header.send_offset = place(header.sends.into(), FlPlanSend::BYTES)?;
    header.recv_index_offset = place(u64::from(header.ranks) + 1, size_of::<u32>())?;
    header.recv_offset = place(header.recvs.into(), FlPlanRecv::BYTES)?;
    header.local_offset = place(header.locals.into(), FlPlanLocal::BYTES)?;
    header.turn_offset = place(header.turns.into(), FlPlanTurn::BYTES)?;
    header.table_bytes = at;
    Some(())
}

impl Default for PlanTable {
    /// A table of nobody, with nothing to do.
    fn default() -> Self {
        let mut table = Self { bytes: Vec::new() };
        table.write(&Parts { recv_index: vec![0], ..Parts::default() });
        table
    }
}

impl PlanTable {
    /// Lays the parts out in the memory of the table before.
    pub(super) fn write(&mut self, parts: &Parts) {
        let mut header = FlPlanHeader {
            lanes: parts.lanes.len() as u32,
            sends: parts.sends.len() as u32,
            recvs: parts.recvs.len() as u32,
            locals: parts.locals.len() as u32,
            turns: parts.turns.len() as u32,
            ..parts.header
        };
        lay_out(&mut header).expect("entries in memory are far fewer than 2^32");
        let bytes = &mut self.bytes;
        bytes.clear();
        bytes.reserve(header.table_bytes as usize);
        header.write(bytes);
        parts.lanes.iter().for_each(|e| e.write(bytes));
        parts.sends.iter().for_each(|e| e.write(bytes));
        parts.recv_index.iter().for_each(|i| bytes.extend_from_slice(&i.to_le_bytes()));
        bytes.resize(header.recv_offset as usize, 0);
        parts.recvs.iter().for_each(|e| e.write(bytes));
        parts.locals.iter().for_each(|e| e.write(bytes));
        parts.turns.iter().for_each(|e| e.write(bytes));
    }

    /// The table as it lies in memory.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its header.
    pub fn header(&self) -> FlPlanHeader {
        FlPlanHeader::read(&self.bytes)
    }

    fn entries<'a, T: Record + 'a>(
        &'a self,
        offset: u64,
        count: u32,
    ) -> impl ExactSizeIterator<Item = T> + 'a {
        let bytes = &self.bytes[offset as usize..][..count as usize * T::BYTES];
        bytes.chunks_exact(T::BYTES).map(T::read)
    }

    /// Its lanes. Messages of a lane go in order; lanes do not wait for each other.
    pub fn lanes(&self) -> impl ExactSizeIterator<Item = FlPlanLane> + '_ {
        let h = self.header();
        self.entries(h.lane_offset, h.lanes)
    }

    /// What leaves, lane by lane.
    pub fn sends(&self) -> impl ExactSizeIterator<Item = FlPlanSend> + '_ {
        let h = self.header();
        self.entries(h.send_offset, h.sends)
    }

    /// What arrives, by source and sequence.
    pub fn recvs(&self) -> impl ExactSizeIterator<Item = FlPlanRecv> + '_ {
        let h = self.header();
        self.entries(h.recv_offset, h.recvs)
    }

    /// Which of [`Self::recvs`] come from one source.
    pub fn recvs_from(&self, src: Rank) -> Range<usize> {
        let at = |i: usize| {
            let offset = self.header().recv_index_offset as usize + i * size_of::<u32>();
            let mut index = [0; 4];
            index.copy_from_slice(&self.bytes[offset..offset + 4]);
            u32::from_le_bytes(index) as usize
        };
        at(src.idx())..at(src.idx() + 1)
    }

    /// What stays in the server.
    pub fn locals(&self) -> impl ExactSizeIterator<Item = FlPlanLocal> + '_ {
        let h = self.header();
        self.entries(h.local_offset, h.locals)
    }

    /// What each transfer moves over the rank's own NICs, by NIC and direction in list order; loose traffic last.
    pub fn turns(&self) -> impl ExactSizeIterator<Item = FlPlanTurn> + '_ {
        let h = self.header();
        self.entries(h.turn_offset, h.turns)
    }

    /// Takes bytes from outside: every count, offset, number and sum is checked.
    ///
    /// # Errors
    /// [`TableError`] for anything that [`PlanTable::compile`] would not write.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        let needed = FlPlanHeader::BYTES as u64;
        if (bytes.len() as u64) < needed {
            return Err(TableError::Short { bytes: bytes.len(), needed });
        }
        let header = FlPlanHeader::read(bytes);
        check_header(&header)?;
        if (bytes.len() as u64) < header.table_bytes {
            return Err(TableError::Short { bytes: bytes.len(), needed: header.table_bytes });
        }
        let table = Self { bytes: bytes[..header.table_bytes as usize].to_vec() };
        table.check_sends(&header)?;
        table.check_recvs(&header)?;
        table.check_locals(&header)?;
        table.check_turns(&header)?;
        Ok(table)
    }

    fn check_sends(&self, h: &FlPlanHeader) -> Result<(), TableError> {
        let mut next = 0u64;
        for (i, lane) in self.lanes().enumerate() {
            require(u64::from(lane.first_send) == next, "first_send", lane.first_send, i)?;
            next += u64::from(lane.sends);
            require(lane.sends > 0 && next <= u64::from(h.sends), "lane sends", lane.sends, i)?;
            let of_lane = self.sends().skip(lane.first_send as usize).take(lane.sends as usize);
            let messages: u128 = of_lane.map(|s| u128::from(s.bytes.div_ceil(h.message_bytes))).sum();
            require(messages == u128::from(lane.messages), "lane messages", lane.messages, i)?;
        }
        require(next == u64::from(h.sends), "sends", h.sends, 0)?;
        let mut cells = Vec::with_capacity(h.sends as usize);
        for (i, s) in self.sends().enumerate() {
            require(is_remote(h, s.dst), "send dst", s.dst, i)?;
            cells.push((s.dst, s.offset, s.bytes, s.first_seq));
        }
        cells.sort_unstable();
        let messages = check_cells(h, cells.into_iter(), "send")?;
        require(messages == h.send_messages, "send_messages", h.send_messages, 0)
    }

    fn check_recvs(&self, h: &FlPlanHeader) -> Result<(), TableError> {
        let mut next = 0;
        for src in 0..h.ranks {
            let span = self.recvs_from(Rank(src));
            let ordered = span.start == next && span.end >= span.start && span.end <= h.recvs as usize;
            require(ordered, "recv_index", span.end as u64, src as usize)?;
            for (i, r) in self.recvs().enumerate().skip(span.start).take(span.len()) {
                require(r.src == src && is_remote(h, src), "recv src", r.src, i)?;
            }
            next = span.end;
        }
        require(next == h.recvs as usize, "recvs", h.recvs, 0)?;
        let padding = &self.bytes[..h.recv_offset as usize]
            [(h.recv_index_offset + 4 * (u64::from(h.ranks) + 1)) as usize..];
        require(padding.iter().all(|&b| b == 0), "padding", 1u32, 0)?;
        let cells = self.recvs().map(|r| (r.src, r.offset, r.bytes, r.first_seq));
        let messages = check_cells(h, cells, "recv")?;
        require(messages == h.recv_messages, "recv_messages", h.recv_messages, 0)
    }

    fn check_locals(&self, h: &FlPlanHeader) -> Result<(), TableError> {
        let mut before = None;
        for (i, local) in self.locals().enumerate() {
            let here =
                local.dst < h.ranks && !is_remote(h, local.dst) && before.is_none_or(|b| b < local.dst);
            require(here && local.reserved == 0, "local dst", local.dst, i)?;
            require(local.bytes > 0, "local bytes", local.bytes, i)?;
            before = Some(local.dst);
        }
        Ok(())
    }

    fn check_turns(&self, h: &FlPlanHeader) -> Result<(), TableError> {
        let mut before = None;
        for (i, turn) in self.turns().enumerate() {
            require(turn.direction <= 1, "turn direction", turn.direction, i)?;
            let key = (turn.nic, turn.direction, turn.transfer, turn.peer_server);
            require(before.is_none_or(|b| b < key), "turn transfer", turn.transfer, i)?;
            let least = turn.bytes.div_ceil(h.message_bytes);
            let plausible = turn.bytes > 0 && (least..=turn.bytes).contains(&turn.messages.into());
            require(plausible, "turn messages", turn.messages, i)?;
            before = Some(key);
        }
        Ok(())
    }
}

fn require(holds: bool, field: &'static str, value: impl Into<u64>, index: usize) -> Result<(), TableError> {
    if holds { Ok(()) } else { Err(TableError::BadField { field, value: value.into(), index }) }
}

fn is_remote(h: &FlPlanHeader, rank: u32) -> bool {
    rank < h.ranks && !(h.first_local_rank..h.first_local_rank + h.local_ranks).contains(&rank)
}

fn check_header(h: &FlPlanHeader) -> Result<(), TableError> {
    require(h.magic == FL_PLAN_MAGIC, "magic", h.magic, 0)?;
    require(h.version == FL_PLAN_VERSION, "version", h.version, 0)?;
    let end = h.first_local_rank.checked_add(h.local_ranks);
    require(end.is_some_and(|end| end <= h.ranks), "local_ranks", h.local_ranks, 0)?;
    let local = h.rank >= h.first_local_rank && h.rank - h.first_local_rank < h.local_ranks;
    require(local, "rank", h.rank, 0)?;
    require(h.msg_class < FL_CLASSES, "msg_class", h.msg_class, 0)?;
    require(h.message_bytes > 0, "message_bytes", h.message_bytes, 0)?;
    let mut expected = *h;
    require(lay_out(&mut expected).is_some() && expected == *h, "table_bytes", h.table_bytes, 0)
}

/// Checks that cells, given by (peer, offset), are tiled from 0 and numbered without gaps; returns their messages.
fn check_cells(
    h: &FlPlanHeader,
    cells: impl Iterator<Item = (u32, u64, u64, u32)>,
    field: &'static str,
) -> Result<u64, TableError> {
    let (mut peer, mut at, mut seq, mut messages) = (None, 0u64, 0u64, 0u64);
    for (i, (rank, offset, bytes, first_seq)) in cells.enumerate() {
        if peer != Some(rank) {
            (peer, at, seq) = (Some(rank), 0, 0);
        }
        require(offset == at, field, offset, i)?;
        require(bytes > 0 && at.checked_add(bytes).is_some(), field, bytes, i)?;
        require(u64::from(first_seq) == seq, field, first_seq, i)?;
        let count = bytes.div_ceil(h.message_bytes);
        (at, seq, messages) = (at + bytes, seq.saturating_add(count), messages.saturating_add(count));
        require(seq <= u64::from(u32::MAX), field, seq, i)?;
    }
    Ok(messages)
}
