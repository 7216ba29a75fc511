//! `serving`: prefill GPUs hand KV caches to decode GPUs, and who waits for the first token (FuseLink, OSDI'25, its
//! OPT-30B with prefill and decode apart).

use std::collections::VecDeque;

use serde::Serialize;

use super::report::{Chart, Outcome, Series, Table, or_dash, values};
use super::{Options, TESTBED, assumptions, by, one_way, percentile, testbed, world_with};
use crate::hw::Nanos;
use crate::sim::draw::{Draw, zipf};
use crate::sim::world::{SimError, World, WorldConfig};
use crate::topo::Rank;

/// One number of instances, one load, one way.
#[derive(Clone, PartialEq, Debug, Serialize)]
struct Row {
    /// Instances; each has 8 / instances GPUs.
    instances: u32,
    /// How NICs are chosen.
    method: &'static str,
    /// Requests per second, all instances together.
    request_per_s: f64,
    /// What they are of all NICs' rate.
    mean_load: f64,
    /// Median time to the first token.
    ttft_p50_ms: f64,
    /// Its 99th percentile.
    ttft_p99_ms: f64,
    /// What the paper reports.
    paper_p50_ms: Option<f64>,
    /// Likewise.
    paper_p99_ms: Option<f64>,
    /// Static's median over this one.
    gain_p50: f64,
}

/// OPT-30B: layers, hidden size, bytes of an fp16 value; a key and a value per token and layer.
const KV_BYTES_PER_TOKEN: u64 = 48 * 7168 * 2 * 2;
/// What its context holds.
const MAX_TOKENS: f64 = 2048.0;
const MEDIAN_TOKENS: f64 = 1400.0;
const SIGMA: f64 = 0.3;
const MIN_TOKENS: f64 = 128.0;
/// Computing a token costs a GPU: 2 x 30e9 operations at 400 Tflop/s.
const TOKEN_NS: f64 = 150_000.0;
/// How unevenly requests fall on instances.
const POPULARITY: f64 = 1.5;
const MESSAGE_BYTES: u32 = 4 << 20;
const REQUESTS: usize = 240;
/// KV bytes over all NICs' rate; at `PAPER_LOAD` static's median at 8 instances is about the paper's.
const LOADS: [f64; 4] = [0.2, 0.4, 0.55, 1.0];
const PAPER_LOAD: f64 = 0.72;
const NICS_BYTE_PER_S: f64 = 400e9;
const GPUS: u32 = 8;

/// A request on its way: who serves it, since when, how much.
#[derive(Clone, Copy, Debug)]
struct Request {
    instance: usize,
    arrives: Nanos,
    /// Prefill is done, and its KV cache may go.
    ready: Nanos,
    kv_bytes: u64,
}

pub(super) fn run(options: &Options) -> Result<Outcome, SimError> {
    let mut rows = Vec::new();
    for instances in [8, 4, 2] {
        rows.extend(both(instances, PAPER_LOAD, options.seed, true)?);
    }
    let by_size = rows.len();
    for load in LOADS {
        rows.extend(both(8, load, options.seed, false)?);
    }
    let config = config();
    let mut assumed = assumptions(TESTBED, &config);
    assumed.extend(words(options.seed));
    Ok(Outcome {
        experiment: "serving",
        assumptions: assumed,
        paper: vec![
            "8 instances TP1: P50 684.54 -> 308.48 ms, P99 903.20 -> 464.55; 4 x TP2: 174.46 -> 122.61, 297.49 -> 259.73; 2 x TP4: 98.09 -> 81.97, 175.36 -> 160.36".into(),
        ],
        tables: vec![
            table("At one load, by instances", &rows[..by_size]),
            table("\n8 instances, by load", &by_load(&rows, by_size)),
        ],
        chart: chart(&by_load(&rows, by_size)),
        rows: values(&rows),
    })
}

/// Rows of 8 instances in order of their load.
fn by_load(rows: &[Row], by_size: usize) -> Vec<Row> {
    let mut rows: Vec<Row> = rows[..2].iter().chain(&rows[by_size..]).cloned().collect();
    rows.sort_by(|a, b| a.mean_load.total_cmp(&b.mean_load));
    rows
}

fn words(seed: u64) -> [String; 7] {
    [
        format!(
            "KV cache of OPT-30B: 48 layers x 7168 x (key + value) x 2 bytes = {KV_BYTES_PER_TOKEN} bytes per token, split evenly over an instance's GPUs"
        ),
        format!(
            "{REQUESTS} requests, Poisson arrivals, seed {seed}; prompts log-normal, median {MEDIAN_TOKENS:.0} tokens, sigma {SIGMA}, {MIN_TOKENS:.0} to {MAX_TOKENS:.0}"
        ),
        format!(
            "prefill: {:.0} us per token and GPU (2 x 30e9 operations at 400 Tflop/s), divided by the instance's GPUs; prefill itself never queues",
            TOKEN_NS / 1e3
        ),
        format!(
            "an instance is drawn by popularity 1 / place^{POPULARITY} (sessions stay where they are): half of 8 instances' requests fall on one"
        ),
        format!(
            "load: KV bytes arriving over all NICs' rate; {PAPER_LOAD} is where static's median at 8 instances is near the paper's; its hot NIC is overloaded for as long as requests arrive"
        ),
        "time to first token: prefill, the wait for the instance's transfers before it, and its own".into(),
        "static: GPU k of one server to GPU k of the other by NIC k; fuselink: the engine chooses".into(),
    ]
}

/// Messages are 8 times as long as elsewhere, and looks 8 times as far apart: seconds are simulated. What may be on the
/// way is fewer messages, so that an owner waits no more than 5 of them.
fn config() -> WorldConfig {
    let message = u64::from(MESSAGE_BYTES);
    let mut config = world_with(testbed(GPUS), MESSAGE_BYTES);
    config.limits.direct_bytes = 2 * message;
    config.limits.borrow_bytes = 5 * message;
    config.delays.look_ns *= 8;
    config.idle_after_ns *= 4;
    config
}

/// Static, then fuselink.
fn both(instances: u32, load: f64, seed: u64, with_paper: bool) -> Result<[Row; 2], SimError> {
    let mean_bytes = mean_kv_bytes(seed);
    let request_per_s = load * NICS_BYTE_PER_S / mean_bytes;
    let requests = draw_requests(instances, request_per_s, seed);
    let paper = |method: &str| match (with_paper, instances, method) {
        (true, 8, "static") => [Some(684.54), Some(903.20)],
        (true, 8, _) => [Some(308.48), Some(464.55)],
        (true, 4, "static") => [Some(174.46), Some(297.49)],
        (true, 4, _) => [Some(122.61), Some(259.73)],
        (true, 2, "static") => [Some(98.09), Some(175.36)],
        (true, 2, _) => [Some(81.97), Some(160.36)],
        _ => [None, None],
    };
    let row = |method, free| {
        let mut times = serve(instances, &requests, free)?;
        let [p50, p99] = [50, 99].map(|p| percentile(&mut times, p) as f64 / 1e6);
        let [paper_p50_ms, paper_p99_ms] = paper(method);
        Ok::<_, SimError>(Row {
            instances,
            method,
            request_per_s,
            mean_load: load,
            ttft_p50_ms: p50,
            ttft_p99_ms: p99,
            paper_p50_ms,
            paper_p99_ms,
            gain_p50: 1.0,
        })
    };
    let (fixed, mut free) = (row("static", false)?, row("fuselink", true)?);
    free.gain_p50 = fixed.ttft_p50_ms / free.ttft_p50_ms;
    Ok([fixed, free])
}

fn tokens(draw: &mut Draw) -> u64 {
    draw.log_normal(MEDIAN_TOKENS, SIGMA).clamp(MIN_TOKENS, MAX_TOKENS) as u64
}

/// Of the very requests that are drawn.
fn mean_kv_bytes(seed: u64) -> f64 {
    let mut draw = Draw::new(seed);
    let sum: u64 = (0..REQUESTS).map(|_| tokens(&mut draw)).sum();
    (sum * KV_BYTES_PER_TOKEN) as f64 / REQUESTS as f64
}

/// In the order in which prefill ends. Lengths and moments are the same for every number of instances, up to the rate.
fn draw_requests(instances: u32, request_per_s: f64, seed: u64) -> Vec<Request> {
    let (mut lengths, mut moments) = (Draw::new(seed), Draw::new(seed ^ 0x5eed));
    let popularity = zipf(instances as usize, POPULARITY);
    let mut now_ns = 0.0;
    let request = |_| {
        now_ns += moments.exponential(1e9 / request_per_s);
        let tokens = tokens(&mut lengths);
        let prefill_ns = tokens as f64 * TOKEN_NS * f64::from(instances) / f64::from(GPUS);
        Request {
            instance: moments.weighted(&popularity),
            arrives: now_ns as Nanos,
            ready: (now_ns + prefill_ns) as Nanos,
            kv_bytes: tokens * KV_BYTES_PER_TOKEN,
        }
    };
    let mut requests: Vec<Request> = (0..REQUESTS).map(request).collect();
    requests.sort_by_key(|r| (r.ready, r.arrives));
    requests
}

/// An instance: what waits, and what it sends now.
#[derive(Default)]
struct Instance {
    waiting: VecDeque<Request>,
    /// The request, and GPUs that have not sent their part.
    sending: Option<(Request, u32)>,
}

/// Times to the first token, one per request.
fn serve(instances: u32, requests: &[Request], free: bool) -> Result<Vec<Nanos>, SimError> {
    let gpus = GPUS / instances;
    let mut world = World::new(config())?;
    let mut all: Vec<Instance> = (0..instances).map(|_| Instance::default()).collect();
    let mut coming: VecDeque<Request> = requests.iter().copied().collect();
    let mut times = Vec::new();
    if let Some(first) = coming.front() {
        world.wake_at(first.ready);
    }
    while times.len() < requests.len() {
        while coming.front().is_some_and(|r| r.ready <= world.now()) {
            let Some(request) = coming.pop_front() else { break };
            all[request.instance].waiting.push_back(request);
            if let Some(next) = coming.front() {
                world.wake_at(next.ready);
            }
        }
        for (rank, _) in world.take_done() {
            let at = &mut all[((rank.0 - GPUS) / gpus) as usize];
            let Some((request, left)) = at.sending.take() else { continue };
            match left - 1 {
                0 => times.push(world.now() - request.arrives),
                left => at.sending = Some((request, left)),
            }
        }
        for (n, instance) in all.iter_mut().enumerate().filter(|(_, i)| i.sending.is_none()) {
            let Some(request) = instance.waiting.pop_front() else { continue };
            instance.sending = Some((request, gpus));
            for gpu in n as u32 * gpus..(n as u32 + 1) * gpus {
                send(&mut world, gpu, request.kv_bytes / u64::from(gpus), free)?;
            }
        }
        world.step()?;
    }
    Ok(times)
}

fn send(world: &mut World, gpu: u32, bytes: u64, free: bool) -> Result<(), SimError> {
    let (src, dst) = (Rank(gpu), Rank(gpu + GPUS));
    for rank in [src, dst] {
        let runs = |r| vec![if free { r } else { by(r, gpu, gpu) }];
        world.open(rank, one_way((src, dst), bytes, rank, MESSAGE_BYTES, runs))?;
    }
    Ok(())
}

fn table(title: &str, rows: &[Row]) -> Table {
    Table::of(
        title,
        rows,
        &[
            ("instances", "", |r| r.instances.to_string()),
            ("method", "", |r| r.method.into()),
            ("requests", "(1/s)", |r| format!("{:.1}", r.request_per_s)),
            ("load", "", |r| format!("{:.2}", r.mean_load)),
            ("P50", "(ms)", |r| format!("{:.2}", r.ttft_p50_ms)),
            ("paper P50", "(ms)", |r| or_dash(r.paper_p50_ms, 2)),
            ("P99", "(ms)", |r| format!("{:.2}", r.ttft_p99_ms)),
            ("paper P99", "(ms)", |r| or_dash(r.paper_p99_ms, 2)),
            ("gain P50", "", |r| format!("{:.2}", r.gain_p50)),
        ],
    )
}

fn chart(rows: &[Row]) -> Chart {
    let line = |method: &'static str| {
        let own = rows.iter().filter(move |r| r.method == method);
        Series::line(method, own.map(|r| (r.mean_load, r.ttft_p50_ms)))
    };
    Chart {
        title: "Time to first token, 8 instances".into(),
        x: "KV bytes over all NICs' rate",
        y: "P50, ms",
        series: ["static", "fuselink"].map(line).into(),
        log_x: false,
    }
}
