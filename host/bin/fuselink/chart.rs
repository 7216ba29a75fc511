//! Charts as SVG: lines over numbers, or bars by name.

use std::fmt::Write as _;

use fuselink::sim::experiments::report::{Chart, Points, Series};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
/// Where the plot begins and ends.
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 20.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = HEIGHT - 56.0;
/// Told apart by people who see colours differently, and in print (Okabe and Ito).
const COLOURS: [&str; 6] = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"];

/// Draws a chart.
pub fn draw(chart: &Chart) -> String {
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{}</text>",
        escape(&chart.title)
    );
    legend(&mut svg, &chart.series);
    let y = Axis::of(values(chart), false);
    grid(&mut svg, chart, y);
    match bar_names(chart) {
        Some(names) => bars(&mut svg, chart, &names, y),
        None => lines(&mut svg, chart, y),
    }
    svg += "</svg>\n";
    svg
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn values(chart: &Chart) -> impl Iterator<Item = f64> + Clone + '_ {
    chart.series.iter().flat_map(|s| -> Vec<f64> {
        match &s.points {
            Points::Line(points) => points.iter().map(|p| p.1).collect(),
            Points::Bars(points) => points.iter().map(|p| p.1).collect(),
        }
    })
}

fn bar_names(chart: &Chart) -> Option<Vec<String>> {
    chart.series.iter().find_map(|s| match &s.points {
        Points::Bars(points) => Some(points.iter().map(|p| p.0.clone()).collect()),
        Points::Line(_) => None,
    })
}

/// A range of numbers and the steps that are marked.
#[derive(Clone, Copy)]
struct Axis {
    from: f64,
    to: f64,
    step: f64,
    log: bool,
}

impl Axis {
    /// From 0, or the least where it is logarithmic, to a round number past the most.
    fn of(values: impl Iterator<Item = f64> + Clone, log: bool) -> Self {
        let most = values.clone().fold(0.0, f64::max);
        if log {
            return Self { from: values.fold(f64::MAX, f64::min), to: most, step: 0.0, log };
        }
        let rough = (most / 5.0).max(1e-9);
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough);
        let step = step.unwrap_or(rough);
        Self { from: 0.0, to: (most / step).ceil() * step, step, log }
    }

    /// Between 0 and 1.
    fn place(self, value: f64) -> f64 {
        let part = |v: f64| if self.log { v.ln() } else { v };
        (part(value) - part(self.from)) / (part(self.to) - part(self.from)).max(1e-9)
    }

    fn x(self, value: f64) -> f64 {
        LEFT + 12.0 + (RIGHT - LEFT - 24.0) * self.place(value)
    }

    fn y(self, value: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * self.place(value)
    }
}

/// At most two digits after the point, none that is 0.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn legend(svg: &mut String, series: &[Series]) {
    let mut x = LEFT;
    for (s, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let name = escape(&s.name);
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.0}\" y=\"34\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{:.0}\" y=\"44\">{name}</text>",
            x + 17.0
        );
        x += 34.0 + 7.0 * s.name.len() as f64;
    }
}

fn grid(svg: &mut String, chart: &Chart, y: Axis) {
    for n in 0..=(y.to / y.step).round() as u32 {
        let value = f64::from(n) * y.step;
        let at = y.y(value);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            at + 4.0,
            number(value)
        );
    }
    let middle = (TOP + BOTTOM) / 2.0;
    let _ = writeln!(
        svg,
        "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\" stroke=\"#444\"/>\n\
         <text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{}</text>\n\
         <text x=\"16\" y=\"{middle:.0}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {middle:.0})\">{}</text>",
        (LEFT + RIGHT) / 2.0,
        HEIGHT - 12.0,
        escape(chart.x),
        escape(chart.y)
    );
}

fn text(svg: &mut String, x: f64, y: f64, text: &str) {
    let text = escape(text);
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.0}\" text-anchor=\"middle\">{text}</text>");
}

/// A name in one line, or in two where it is wider than its place.
fn lines_of(name: &str, width: f64) -> Vec<&str> {
    const LETTER: f64 = 6.8;
    let spaces = name.char_indices().filter(|c| c.1 == ' ').map(|c| c.0);
    let middle = spaces.min_by_key(|at| at.abs_diff(name.len() / 2));
    match middle.filter(|_| name.len() as f64 * LETTER > width) {
        Some(at) => vec![&name[..at], &name[at + 1..]],
        None => vec![name],
    }
}

fn lines(svg: &mut String, chart: &Chart, y: Axis) {
    let all: Vec<&(f64, f64)> = chart
        .series
        .iter()
        .flat_map(|s| match &s.points {
            Points::Line(points) => points.iter(),
            Points::Bars(_) => [].iter(),
        })
        .collect();
    let x = Axis::of(all.iter().map(|p| p.0), chart.log_x);
    let mut places: Vec<f64> = all.iter().map(|p| p.0).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let mut last = f64::MIN;
    for &place in places.iter().filter(|p| {
        // Marks that would touch are left out.
        let fits = x.x(**p) - last > 32.0;
        last = if fits { x.x(**p) } else { last };
        fits
    }) {
        text(svg, x.x(place), BOTTOM + 18.0, &number(place));
    }
    for (s, colour) in chart.series.iter().zip(COLOURS.iter().cycle()) {
        let Points::Line(points) = &s.points else { continue };
        let path: Vec<String> = points.iter().map(|p| format!("{:.1},{:.1}", x.x(p.0), y.y(p.1))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            path.join(" ")
        );
        for p in points {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: {} at {}</title></circle>",
                x.x(p.0),
                y.y(p.1),
                escape(&s.name),
                number(p.1),
                number(p.0)
            );
        }
    }
}

fn bars(svg: &mut String, chart: &Chart, names: &[String], y: Axis) {
    let group = (RIGHT - LEFT) / names.len() as f64;
    let width = group * 0.8 / chart.series.len() as f64;
    for (n, name) in names.iter().enumerate() {
        let begin = LEFT + group * n as f64;
        for (nth, line) in lines_of(name, group).into_iter().enumerate() {
            let below = 18.0 + 13.0 * nth as f64;
            text(svg, begin + group / 2.0, BOTTOM + below, line);
        }
        for (k, (s, colour)) in chart.series.iter().zip(COLOURS.iter().cycle()).enumerate() {
            let Points::Bars(points) = &s.points else { continue };
            let Some((_, value)) = points.iter().find(|p| p.0 == *name) else { continue };
            let (x, top) = (begin + group * 0.1 + width * k as f64, y.y(*value));
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\"><title>{}: {}</title></rect>",
                width - 1.0,
                BOTTOM - top,
                escape(&s.name),
                number(*value)
            );
        }
    }
}
