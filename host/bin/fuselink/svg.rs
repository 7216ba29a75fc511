//! The schedule as a picture: two rows per server (what it sends, what it receives), transfers as blocks.

use std::fmt::Write as _;

use fuselink::plan::{Replay, Schedule};
use fuselink::topo::Cluster;

const LEFT: f64 = 110.0;
const WIDTH: f64 = 1000.0;
const TOP: f64 = 44.0;
const ROW: f64 = 14.0;
const GAP: f64 = 8.0;

/// Draws a schedule that was replayed.
pub fn timeline(cluster: &Cluster, schedule: &Schedule, replay: &Replay) -> String {
    let servers = cluster.server_count();
    let end_ns = replay.pipeline.done_ns.max(replay.cost_ns).max(1);
    let x = |ns: u64| LEFT + WIDTH * ns as f64 / end_ns as f64;
    let y = |server: u32, receives: bool| {
        TOP + f64::from(server) * (2.0 * ROW + GAP) + if receives { ROW } else { 0.0 }
    };
    let height = y(servers, false) + 30.0;
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"8\" y=\"18\" font-size=\"13\">{}: {:.1} us in {} transfers, lower bound {:.1} us. A block is a \
         transfer; its colour is the other server.</text>",
        LEFT + WIDTH + 20.0,
        schedule.method,
        end_ns as f64 / 1e3,
        schedule.transfers.len(),
        schedule.bound.lower_us(),
    );
    for server in 0..servers {
        for (receives, word) in [(false, "sends"), (true, "receives")] {
            let label = if receives { word.to_owned() } else { format!("server {server} {word}") };
            let row = y(server, receives);
            let _ = writeln!(
                svg,
                "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{label}</text>\
                 <rect x=\"{LEFT}\" y=\"{row:.0}\" width=\"{WIDTH}\" height=\"{:.0}\" fill=\"#eee\"/>",
                LEFT - 6.0,
                row + ROW - 3.0,
                ROW - 1.0,
            );
        }
    }
    for (at, (&(src, dst), span)) in schedule.transfers.iter().zip(&replay.spans).enumerate() {
        for (row, other) in [(y(src.0, false), dst.0), (y(dst.0, true), src.0)] {
            let (left, width) = (x(span.start_ns), x(span.end_ns) - x(span.start_ns));
            let _ = writeln!(
                svg,
                "<rect x=\"{left:.2}\" y=\"{row:.0}\" width=\"{:.2}\" height=\"{:.0}\" fill=\"{}\"><title>transfer {at}: \
                 {src} to {dst}, {:.1} to {:.1} us</title></rect>",
                (width - 0.5).max(0.3),
                ROW - 1.0,
                colour(other, servers),
                span.start_ns as f64 / 1e3,
                span.end_ns as f64 / 1e3,
            );
            if width > 18.0 {
                let _ = writeln!(
                    svg,
                    "<text x=\"{:.2}\" y=\"{:.0}\" text-anchor=\"middle\" fill=\"white\" font-size=\"10\">{other}</text>",
                    left + width / 2.0,
                    row + ROW - 3.5,
                );
            }
        }
    }
    if replay.loose_ns > 0 {
        let _ = writeln!(
            svg,
            "<rect x=\"{:.2}\" y=\"{TOP}\" width=\"{:.2}\" height=\"{:.0}\" fill=\"#888\" opacity=\"0.4\"><title>bytes \
             outside any transfer</title></rect>",
            x(replay.cost_ns - replay.loose_ns),
            x(replay.loose_ns) - LEFT,
            y(servers, false) - TOP,
        );
        if replay.loose_ns > replay.cost_ns / 4 {
            let middle = (x(replay.cost_ns - replay.loose_ns) + x(replay.cost_ns)) / 2.0;
            let _ = writeln!(
                svg,
                "<text x=\"{middle:.0}\" y=\"{:.0}\" text-anchor=\"middle\">in no order, outside any transfer</text>",
                (y(0, false) + y(servers, false)) / 2.0,
            );
        }
    }
    if end_ns > replay.cost_ns {
        let _ = writeln!(
            svg,
            "<rect x=\"{:.2}\" y=\"{TOP}\" width=\"{:.2}\" height=\"{:.0}\" fill=\"#c80\" opacity=\"0.4\"><title>scale-up \
             adds {:.1} us</title></rect>",
            x(replay.cost_ns),
            x(end_ns) - x(replay.cost_ns),
            y(servers, false) - TOP,
            (end_ns - replay.cost_ns) as f64 / 1e3,
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{LEFT}\" y=\"{0:.0}\">0</text><text x=\"{1:.0}\" y=\"{0:.0}\" text-anchor=\"end\">{2:.1} us</text>\n</svg>",
        height - 12.0,
        LEFT + WIDTH,
        end_ns as f64 / 1e3,
    );
    svg
}

/// Hues far apart for servers that are close.
fn colour(server: u32, servers: u32) -> String {
    let hue = f64::from(server) * 360.0 / f64::from(servers.max(1));
    format!("hsl({hue:.0},55%,{}%)", if server.is_multiple_of(2) { 42 } else { 55 })
}
