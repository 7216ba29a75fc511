//! What a message costs in engine decisions: arming, posting and completing at its sender; arriving, publishing,
//! draining and crediting at its receiver. Two engines face to face, no rings, no NICs. One JSON line.
//! `cargo bench --bench engine`.

mod instructions;
mod machine;

use std::sync::Arc;
use std::time::Instant;

use fuselink::doorbell::{Class, Doorbell};
use fuselink::engine::call::{Call, CallId, Incoming, Run};
use fuselink::engine::lots::LotsAtStart;
use fuselink::engine::route::{NicState, Policy, RouteLimits};
use fuselink::engine::slots::{SlotConfig, SlotLayout};
use fuselink::engine::{Engine, EngineConfig, NicLoad, NicView};
use fuselink::topo::{Cluster, NicIdx, Rank, Server};

const MESSAGE: u32 = 65_536;
const MESSAGES: u64 = 20_000;
const NICS: u32 = 8;
const SAMPLES: usize = 101;

fn engine(cluster: &Arc<Cluster>, rank: Rank) -> Engine {
    let slots = SlotConfig::most(MESSAGE, 0);
    let mut engine = Engine::new(EngineConfig {
        rank,
        cluster: Arc::clone(cluster),
        slots: SlotLayout::new(cluster, cluster.server_of(rank), slots).expect("slots"),
        work_queues: 2,
        armed_depth: 8,
        limits: RouteLimits {
            direct_bytes: 3 * u64::from(MESSAGE),
            borrow_bytes: 8 * u64::from(MESSAGE),
            policy: Policy::WHOLE,
        },
        lookahead_bytes: 0,
        direct_nic: cluster.direct_nic(rank),
        lots: LotsAtStart::All,
        call: CallId(0),
    });
    let idle = NicLoad { state: NicState::Idle, borrowed_bytes: 0 };
    for nic in (0..NICS).map(NicIdx) {
        engine.update_nic(nic, NicView { egress: idle, ingress: idle, ..NicView::default() });
    }
    engine
}

/// One call of `MESSAGES` messages from rank 0 to the first rank of the other server, NICs free to choose.
fn call(id: u64, sends: bool) -> Call {
    let bytes = MESSAGES * u64::from(MESSAGE);
    let (dst, src) = (Rank(NICS), Rank(0));
    let run =
        Run { piece: 0, dst, first_seq: 0, bytes, egress: None, ingress: None, transfer: None, queue: None };
    Call {
        id: CallId(id),
        class: Class::Put,
        message_bytes: MESSAGE,
        timeout_ns: u64::MAX,
        sends: if sends { vec![run] } else { Vec::new() },
        incoming: if sends {
            Vec::new()
        } else {
            vec![Incoming { src, bytes, ingress: None, transfer: None }]
        },
        turns: Vec::new(),
    }
}

/// Carries everything that one engine has decided to the other.
fn step(sender: &mut Engine, receiver: &mut Engine, now: u64) -> u64 {
    let mut arrived = 0;
    while let Some(arm) = sender.poll_arm() {
        let doorbell = Doorbell::Send {
            class: arm.class,
            queue: arm.queue,
            idx: arm.idx,
            bytes: arm.bytes.into(),
            signal: None,
        };
        sender.on_doorbell(doorbell, now).expect("armed");
    }
    while let Some(post) = sender.poll_post() {
        receiver.on_arrival(post.dst_nic, post.imm, post.bytes, now).expect("granted");
        sender.on_completed(post.cookie, Ok(()), now).expect("posted");
    }
    while let Some(p) = receiver.poll_publish() {
        let doorbell = Doorbell::Drained { class: p.class, nic: p.nic, slot: p.slot };
        receiver.on_doorbell(doorbell, now).expect("arrived");
        arrived += 1;
    }
    while let Some(control) = receiver.poll_credit() {
        // Others get standing credits, and take no part.
        if control.write.to() == Rank(0) {
            sender.on_word(Rank(NICS), control.write, now).expect("lent");
        }
    }
    arrived
}

struct Ends {
    sender: Engine,
    receiver: Engine,
    calls: u64,
}

impl Ends {
    fn new() -> Self {
        let cluster = Arc::new(Cluster::uniform(2, Server::new(NICS, &[400_000; NICS as usize], 450_000)));
        let (mut sender, mut receiver) = (engine(&cluster, Rank(0)), engine(&cluster, Rank(NICS)));
        step(&mut sender, &mut receiver, 0);
        Self { sender, receiver, calls: 0 }
    }

    fn call(&mut self) {
        self.calls += 1;
        let id = self.calls;
        self.sender.open(&call(id, true), id).expect("open");
        self.receiver.open(&call(id, false), id).expect("open");
        let mut arrived = 0;
        while arrived < MESSAGES {
            arrived += step(&mut self.sender, &mut self.receiver, id);
        }
    }
}

fn main() {
    let mut ends = Ends::new();
    if let Some(rounds) = instructions::rounds_asked() {
        return (0..rounds).for_each(|_| ends.call());
    }
    let ns_per_message = || {
        let begin = Instant::now();
        ends.call();
        begin.elapsed().as_nanos() as f64 / MESSAGES as f64
    };
    let mut ns: Vec<_> = std::iter::repeat_with(ns_per_message).take(SAMPLES).collect();
    ns.sort_by(f64::total_cmp);
    println!(
        "{{\"name\":\"engine\",\"nics\":{NICS},\"messages\":{MESSAGES},\"both_ends_p50_ns\":{:.1},\
         \"both_ends_p99_ns\":{:.1},\"instructions\":{},\"machine\":\"{}\"}}",
        ns[ns.len() / 2],
        ns[ns.len() * 99 / 100],
        instructions::json(instructions::per_round(1, 5).map(|n| n / MESSAGES as f64)),
        machine::name()
    );
}
