//! What an engine has to do for a plan table: where plans and engines meet.

use crate::abi::{FL_CLASS_PLAN, FL_NO_NIC, FL_NO_TRANSFER};
use crate::doorbell::Class;
use crate::engine::call::{Call, CallId, Direction, Incoming, Run, Turn};
use crate::hw::Nanos;
use crate::plan::PlanTable;
use crate::topo::{NicIdx, Rank, ServerId};

/// The NIC that a table names; `None` where the engine chooses.
pub fn nic(number: u16) -> Option<NicIdx> {
    (u32::from(number) != FL_NO_NIC).then_some(NicIdx(number.into()))
}

fn transfer(number: u32) -> Option<u32> {
    (number != FL_NO_TRANSFER).then_some(number)
}

/// One rank's part of a planned collective.
pub fn call_of(table: &PlanTable, id: CallId, timeout_ns: Nanos) -> Call {
    let header = table.header();
    let sends = table.sends().enumerate().map(|(i, s)| Run {
        piece: i as u32,
        dst: Rank(s.dst),
        first_seq: s.first_seq,
        bytes: s.bytes,
        egress: nic(s.egress),
        ingress: nic(s.ingress),
        transfer: transfer(s.transfer),
        queue: None,
    });
    let incoming = table.recvs().map(|r| Incoming {
        src: Rank(r.src),
        bytes: r.bytes,
        ingress: nic(r.ingress),
        transfer: transfer(r.transfer),
    });
    let turns = table.turns().map(|t| Turn {
        nic: NicIdx(t.nic.into()),
        direction: if t.direction == 0 { Direction::Egress } else { Direction::Ingress },
        transfer: t.transfer,
        peer: ServerId(t.peer_server),
        bytes: t.bytes,
    });
    Call {
        id,
        class: if header.msg_class == FL_CLASS_PLAN { Class::Plan } else { Class::Put },
        message_bytes: header.message_bytes as u32,
        timeout_ns,
        sends: sends.collect(),
        incoming: incoming.collect(),
        turns: turns.collect(),
    }
}
