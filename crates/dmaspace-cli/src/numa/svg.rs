//! Plans and simulations of nodes as pictures, in the style of the other [pictures](crate::draw::svg).

use crate::numa::plan::{Plan, PolicyPlan, name};
use ioas::Placement;
use lab::study::{Heat, HeatMap, Traffic};

use crate::draw::svg::{MARGIN, WIDTH, begin, escape, text};
use crate::size::{bytes, counted, three_digits};

/// Boxes of nodes beside each other.
const COLUMNS: u32 = 4;
const BOX: u32 = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * 12) / COLUMNS;
/// Lines of devices in a box; what is over is counted.
const MOST_LINES: usize = 10;
/// Nodes of a picture; what is over is counted.
const MOST_NODES: usize = 16;
const LINE: u32 = 18;

/// What both add to the style of all.
const STYLE: &str = "\
    .box{fill:#eef1f3;stroke:#8a949d}.table{fill:#476fc4}.on{fill:#ffffff}.near{fill:#1f7a6d}.far{fill:#c2402a}\n\
    @media (prefers-color-scheme: dark){\
    .box{fill:#20262c;stroke:#6b757e}.near{fill:#46b8a8}.far{fill:#ec7a62}}\n";

/// Nodes with their devices and tables, under one table for all and under one on each node.
pub(crate) fn plan(plan: &Plan) -> String {
    let shown = plan
        .policies
        .iter()
        .filter(|policy| matches!(policy.placement, Placement::Shared | Placement::PerNode));
    let mut body = String::new();
    let mut y = 70;
    for policy in shown {
        y = panel(&mut body, plan, policy, y);
    }
    let title = format!(
        "{} for {} on {}",
        bytes(plan.memory_bytes),
        counted(plan.topology.devices().len() as u64, "device"),
        counted(plan.topology.nodes().len() as u64, "node"),
    );
    let subtitle = "tables with leaves of 4 KiB; GB/s predicted by a formula, not measured";
    begin(y, &title, subtitle, STYLE) + &body + "</svg>\n"
}

/// One policy from `top` on; where the next begins.
fn panel(svg: &mut String, plan: &Plan, policy: &PolicyPlan, top: u32) -> u32 {
    let heading = "font-weight=\"600\"";
    text(
        svg,
        "ink",
        MARGIN,
        top + 16,
        heading,
        &escape(&name(policy.placement)),
    );
    let nodes: Vec<Option<u32>> = places(plan, policy);
    let lines = |node: &Option<u32>| {
        policy
            .devices
            .iter()
            .filter(|device| device.node == *node)
            .count()
    };
    let most = nodes
        .iter()
        .map(lines)
        .max()
        .unwrap_or(0)
        .min(MOST_LINES + 1) as u32;
    let height = 62 + most * LINE;
    let mut bottom = top + 28;
    for (place, node) in (0u32..).zip(nodes.iter().take(MOST_NODES)) {
        let x = MARGIN + place % COLUMNS * (BOX + 12);
        let y = top + 28 + place / COLUMNS * (height + 12);
        one_node(svg, plan, policy, *node, (x, y, height));
        bottom = y + height;
    }
    if let Some(over) = nodes.len().checked_sub(MOST_NODES + 1) {
        let over = format!("and {} more nodes", over + 1);
        text(svg, "faint", MARGIN, bottom + 16, "", &over);
        bottom += 18;
    }
    bottom + 24
}

/// The nodes, and the place of what is not known, if there is any.
fn places(plan: &Plan, policy: &PolicyPlan) -> Vec<Option<u32>> {
    let unknown = policy.devices.iter().any(|device| device.node.is_none())
        || policy.domains.iter().any(|domain| domain.node.is_none());
    let nodes = plan.topology.nodes().iter().map(|node| Some(node.id));
    nodes.chain(unknown.then_some(None)).collect()
}

fn one_node(
    svg: &mut String,
    plan: &Plan,
    policy: &PolicyPlan,
    node: Option<u32>,
    (x, y, height): (u32, u32, u32),
) {
    *svg += &format!(
        "<rect class=\"box\" x=\"{x}\" y=\"{y}\" width=\"{BOX}\" height=\"{height}\" rx=\"4\"/>\n"
    );
    let known = plan
        .topology
        .nodes()
        .iter()
        .find(|known| Some(known.id) == node);
    let title = match known {
        None => "node not known".into(),
        Some(node) if node.memory_bytes == 0 => format!("node {}, no memory", node.id),
        Some(node) => format!("node {}, {}", node.id, bytes(node.memory_bytes)),
    };
    text(svg, "ink", x + 10, y + 20, "font-weight=\"600\"", &title);
    let tables = policy
        .tables
        .first()
        .into_iter()
        .flat_map(|tables| &tables.nodes);
    if let Some(tables) = tables.clone().find(|tables| tables.node == node) {
        let (top, width) = (y + 28, BOX - 20);
        *svg += &format!(
            "<rect class=\"table\" x=\"{}\" y=\"{top}\" width=\"{width}\" height=\"20\" rx=\"3\"/>\n",
            x + 10
        );
        let words = format!("tables, {}", bytes(tables.bytes));
        text(svg, "on", x + 18, y + 43, "", &words);
    }
    let devices: Vec<_> = policy
        .devices
        .iter()
        .filter(|device| device.node == node)
        .collect();
    let mut line = y + 66;
    for device in devices.iter().take(MOST_LINES) {
        let near = device.node.is_some() && device.node == device.tables_on;
        let class = if near { "near" } else { "far" };
        let rate = device.bytes_per_second.map_or("not known".into(), |rate| {
            format!("{} GB/s", three_digits(rate / 1e9))
        });
        text(
            svg,
            class,
            x + 10,
            line,
            "",
            &format!("{}  {rate}", escape(&device.address)),
        );
        line += LINE;
    }
    if devices.len() > MOST_LINES {
        let over = format!("and {} more", devices.len() - MOST_LINES);
        text(svg, "faint", x + 10, line, "", &over);
    }
}

const CELL: u32 = 120;
const ROW: u32 = 34;
const LABEL: u32 = 84;

/// How many times as fast with a table on each node: leaves by nodes, for each traffic.
pub(crate) fn heat_map(map: &HeatMap) -> String {
    let mut rows: Vec<u64> = map.cells.iter().map(|cell| cell.leaf_bytes).collect();
    rows.sort_unstable();
    rows.dedup();
    let mut columns: Vec<u32> = map.cells.iter().map(|cell| cell.nodes).collect();
    columns.sort_unstable();
    columns.dedup();
    let below = 106 + rows.len() as u32 * ROW;
    let height = below + 58;
    let title = format!(
        "{} devices: a table on each node against one for all",
        map.devices
    );
    let subtitle =
        "times the bytes a second of all devices, by largest leaf and number of nodes: simulated";
    let mut svg = begin(height, &title, subtitle, STYLE);
    for (side, traffic) in [(0, Traffic::Streams), (1, Traffic::Random)] {
        let left = MARGIN + side * (LABEL + CELL * 3 + 12);
        text(
            &mut svg,
            "ink",
            left + LABEL,
            78,
            "font-weight=\"600\"",
            &traffic.to_string(),
        );
        for (column, nodes) in (0..).zip(&columns) {
            let x = left + LABEL + column * CELL + CELL / 2;
            let words = format!("{nodes} nodes");
            text(&mut svg, "faint", x, 98, "text-anchor=\"middle\"", &words);
        }
        for (row, leaf) in (0..).zip(&rows) {
            let y = 106 + row * ROW;
            text(&mut svg, "faint", left, y + 21, "", &bytes(*leaf));
            for (column, nodes) in (0..).zip(&columns) {
                let at = |cell: &&Heat| {
                    (cell.traffic, cell.leaf_bytes, cell.nodes) == (traffic, *leaf, *nodes)
                };
                if let Some(cell) = map.cells.iter().find(at) {
                    one_cell(&mut svg, cell, left + LABEL + column * CELL, y);
                }
            }
        }
    }
    // The scale of the colours.
    for (nth, times) in (0..).zip([1.0, 1.2, 1.4, 1.6, 1.8]) {
        let (x, y) = (MARGIN + LABEL + nth * CELL / 2, below + 10);
        let colour = heat(times);
        let width = CELL / 2;
        svg += &format!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"14\" fill=\"{colour}\"/>\n"
        );
        let words = format!("{times:.1} times");
        text(&mut svg, "faint", x + 2, y + 28, "", &words);
    }
    svg + "</svg>\n"
}

/// From grey where nothing is gained to green at 1.9 times.
fn heat(gain: f64) -> String {
    let heat = ((gain - 1.0) / 0.9).clamp(0.0, 1.0);
    let mix = |cold: f64, hot: f64| (cold + (hot - cold) * heat).round() as u8;
    let (red, green, blue) = (mix(130.0, 0.0), mix(138.0, 110.0), mix(145.0, 80.0));
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn one_cell(svg: &mut String, cell: &Heat, x: u32, y: u32) {
    let gain = cell.gain();
    let colour = heat(gain);
    let (shared, per_node) = (cell.shared_bytes_per_second, cell.per_node_bytes_per_second);
    *svg += &format!(
        "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"3\" \
         fill=\"{colour}\"><title>{} GB/s with one table, {} with {}</title></rect>\n",
        CELL - 4,
        ROW - 4,
        three_digits(shared / 1e9),
        three_digits(per_node / 1e9),
        cell.nodes,
    );
    let words = format!("{gain:.2} ×");
    text(
        svg,
        "on",
        x + (CELL - 4) / 2,
        y + 20,
        "text-anchor=\"middle\"",
        &words,
    );
}
