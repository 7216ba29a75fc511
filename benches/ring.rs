//! What a descriptor costs the consumer: how many it takes in a second from memory that another thread has filled, and in how many
//! instructions (counted by valgrind where there is one: a count does not depend on what else the host does); and descriptors
//! per second while a producer's thread pushes. One JSON line. `cargo bench --bench ring`.

mod instructions;
mod machine;

use std::sync::Barrier;
use std::time::Instant;

use fuselink::ring::{Consumer, Producer, RingLayout, write_entry};
use fuselink::words::{AtomicU64, Ordering, Words, heap_words};

const CAPACITY: u64 = 4096;
const DESCRIPTORS: u64 = 4_000_000;
const RUNS: usize = 21;

type Memory = std::sync::Arc<[AtomicU64]>;

/// As a kernel's block does: claim without a shared loop, look at the consumer's index only when the ring may be full.
struct Filler {
    memory: Memory,
    layout: RingLayout,
    seen_cons_idx: u64,
}

impl Filler {
    fn push(&mut self, idx: u64) {
        while idx - self.seen_cons_idx >= self.layout.capacity {
            self.seen_cons_idx = self.memory.word(self.layout.cons_idx_at).load(Ordering::Acquire);
            if idx - self.seen_cons_idx >= self.layout.capacity {
                std::thread::yield_now();
            }
        }
        write_entry(&self.memory, self.layout.entries_at, idx, self.layout.capacity, &[idx, 1, 2, 3]);
    }
}

/// Takes all descriptors, checks their order, and returns descriptors per second.
fn drain(consumer: &mut Consumer<Memory, 4>) -> f64 {
    let begin = Instant::now();
    let mut next = 0;
    while next < DESCRIPTORS {
        match consumer.pop() {
            Some(words) => {
                assert_eq!(words[0], next);
                next += 1;
            }
            None => {
                consumer.publish();
                std::thread::yield_now();
            }
        }
    }
    DESCRIPTORS as f64 / begin.elapsed().as_secs_f64()
}

/// A producer of its own thread, while the consumer pops.
fn streamed(push: fn(Memory, RingLayout)) -> f64 {
    let memory = heap_words(RingLayout::words(4, CAPACITY));
    let layout = RingLayout::at(0, CAPACITY);
    let mut consumer = Consumer::new(memory.clone(), layout);
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            push(memory.clone(), layout);
        });
        start.wait();
        drain(&mut consumer)
    })
}

fn kernel_like(memory: Memory, layout: RingLayout) {
    let mut filler = Filler { memory, layout, seen_cons_idx: 0 };
    (0..DESCRIPTORS).for_each(|idx| filler.push(idx));
}

fn process_like(memory: Memory, layout: RingLayout) {
    let producer = Producer::<_, 4>::new(memory, layout);
    for idx in 0..DESCRIPTORS {
        while producer.push(&[idx, 1, 2, 3]).is_err() {
            std::thread::yield_now();
        }
    }
}

/// A ring that is filled a lap at a time, and emptied when it is full.
struct Laps {
    memory: Memory,
    layout: RingLayout,
    consumer: Consumer<Memory, 4>,
    idx: u64,
}

impl Laps {
    fn new() -> Self {
        let memory = heap_words(RingLayout::words(4, CAPACITY));
        let layout = RingLayout::at(0, CAPACITY);
        let consumer = Consumer::new(memory.clone(), layout);
        Self { memory, layout, consumer, idx: 0 }
    }

    fn fill(&mut self) {
        for idx in self.idx..self.idx + CAPACITY {
            write_entry(&self.memory, self.layout.entries_at, idx, CAPACITY, &[idx, 1, 2, 3]);
        }
    }

    fn pop(&mut self) {
        for expected in self.idx..self.idx + CAPACITY {
            assert_eq!(self.consumer.pop().map(|words| words[0]), Some(expected));
        }
        self.idx += CAPACITY;
    }
}

/// The consumer alone, on one core: laps that another thread has filled when it comes. What the host's side costs without waiting
/// for the producer.
fn consumed() -> f64 {
    let (mut laps, mut seconds) = (Laps::new(), 0.0);
    while laps.idx < DESCRIPTORS {
        std::thread::scope(|scope| {
            scope.spawn(|| laps.fill());
        });
        let begin = Instant::now();
        laps.pop();
        seconds += begin.elapsed().as_secs_f64();
    }
    laps.idx as f64 / seconds
}

const COUNTED_LAPS: u64 = 16;
/// What the program does when it runs under valgrind: its first argument.
const FILL: &str = "fill-alone";
const FILL_AND_POP: &str = "fill-and-pop";

fn counted(pop: bool) {
    for _ in 0..COUNTED_LAPS {
        let mut laps = Laps::new();
        laps.fill();
        if pop {
            laps.pop();
        }
    }
}

/// What a descriptor costs the consumer: filling and popping, less filling.
fn instructions_per_descriptor() -> Option<f64> {
    let more = instructions::of(&[FILL_AND_POP])?.checked_sub(instructions::of(&[FILL])?)?;
    Some(more as f64 / (COUNTED_LAPS * CAPACITY) as f64)
}

fn median(run: impl Fn() -> f64) -> f64 {
    let mut rates: Vec<_> = (0..RUNS).map(|_| run()).collect();
    rates.sort_by(f64::total_cmp);
    rates[RUNS / 2] / 1e6
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some(FILL) => return counted(false),
        Some(FILL_AND_POP) => return counted(true),
        _ => {}
    }
    let instructions = instructions::json(instructions_per_descriptor());
    let (consumer, kernel, process) =
        (median(consumed), median(|| streamed(kernel_like)), median(|| streamed(process_like)));
    println!(
        "{{\"name\":\"ring\",\"words\":4,\"capacity\":{CAPACITY},\"descriptors\":{DESCRIPTORS},\"runs\":{RUNS},\
         \"consumer_million_per_s\":{consumer:.1},\"kernel_to_host_million_per_s\":{kernel:.1},\
         \"process_to_process_million_per_s\":{process:.1},\"instructions_per_descriptor\":{instructions},\"machine\":\"{}\"}}",
        machine::name()
    );
}
