//! Plans and simulations of nodes as text.

use crate::numa::plan::{Plan, PolicyPlan, name};
use lab::study::{BUFFER, Basis, HeatMap, Row, STREAMS, Standing, Study, TOLERANCE, Traffic};

use crate::draw::sheet::{Paint, Sheet};

use crate::numa::{LoadRow, Published, Simulated};
use crate::size::{bytes, count, counted, three_digits};

/// What stands for what is not known.
const UNKNOWN: &str = "-";

/// A plan.
pub(crate) fn plan(plan: &Plan, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    machine(&mut sheet, plan);
    devices(&mut sheet, plan);
    predictions(&mut sheet, plan);
    policies(&mut sheet, plan);
    notes(&mut sheet, plan);
    sheet.into_text()
}

fn number(number: Option<u32>) -> String {
    number.map_or(UNKNOWN.into(), |number| number.to_string())
}

fn machine(sheet: &mut Sheet, plan: &Plan) {
    sheet.section("nodes");
    let head = ["node", "memory", "CPUs", "distances", "units"];
    let mut rows = vec![head.map(String::from)];
    let topology = &plan.topology;
    for node in topology.nodes() {
        let units = topology
            .units()
            .iter()
            .filter(|unit| unit.node == Some(node.id));
        let units: Vec<_> = units.map(|unit| unit.name.as_str()).collect();
        let distances: Vec<_> = node.distances.iter().map(u32::to_string).collect();
        rows.push([
            node.id.to_string(),
            if node.memory_bytes == 0 {
                "none".into()
            } else {
                bytes(node.memory_bytes)
            },
            node.cpus.to_string(),
            distances.join(" "),
            units.join(" "),
        ]);
    }
    sheet.table(&rows);
    let lost = topology.units().iter().filter(|unit| unit.node.is_none());
    let lost: Vec<_> = lost.map(|unit| unit.name.as_str()).collect();
    if !lost.is_empty() {
        sheet.value("not known", &format!("the nodes of {}", lost.join(", ")));
    }
    // The tables below are over all of it.
    let memory = bytes(plan.memory_bytes);
    sheet.gap();
    sheet.value("mapped", &format!("{memory} in one piece"));
}

fn devices(sheet: &mut Sheet, plan: &Plan) {
    sheet.section("devices, links in GB/s");
    let names = ["address", "kind", "group", "unit", "node", "link"];
    let mut rows = vec![names.map(String::from)];
    let topology = &plan.topology;
    for device in topology.devices() {
        let unit = device.unit.clone().unwrap_or_else(|| "none".into());
        let kind = match device.kind.as_str() {
            "" => UNKNOWN,
            kind => kind,
        };
        let link = device.link_bytes_per_second.map(gigabytes);
        rows.push([
            device.address.clone(),
            kind.into(),
            number(device.group),
            unit,
            number(topology.node_of(device)),
            link.unwrap_or_else(|| format!("({})", gigabytes(plan.model.link_bytes_per_second))),
        ]);
    }
    match rows.len() {
        1 => sheet.line("  none"),
        _ => sheet.table(&rows),
    }
    if topology
        .devices()
        .iter()
        .any(|device| device.link_bytes_per_second.is_none())
    {
        sheet.line("  in brackets: assumed");
    }
}

/// What devices are predicted to get under each policy.
fn predictions(sheet: &mut Sheet, plan: &Plan) {
    let Some(first) = plan.policies.first().filter(|one| !one.devices.is_empty()) else {
        return;
    };
    sheet.section("predicted GB/s with leaves of 4 KiB (a formula, not measured)");
    let policies = plan.policies.iter().map(|policy| name(policy.placement));
    let head = [String::from("address")].into_iter().chain(policies);
    let mut rows = vec![head.collect::<Vec<_>>()];
    for device in &first.devices {
        let rates = plan.policies.iter().map(|policy| {
            let mut devices = policy.devices.iter();
            let found = devices.find(|found| found.address == device.address);
            let rate = found.and_then(|found| found.bytes_per_second);
            rate.map_or(UNKNOWN.into(), gigabytes)
        });
        rows.push([device.address.clone()].into_iter().chain(rates).collect());
    }
    sheet.table(&rows);
}

fn gigabytes(rate: f64) -> String {
    three_digits(rate / 1e9)
}

fn policies(sheet: &mut Sheet, plan: &Plan) {
    // Where no unit translates there is nothing to place.
    let placed = plan.policies.iter();
    for policy in placed.filter(|policy| !policy.domains.is_empty()) {
        sheet.section(&name(policy.placement));
        domains(sheet, policy);
        let mut rows = vec![["leaves", "entries of a map", "tables"].map(String::from)];
        rows.extend(policy.tables.iter().map(|tables| {
            let each = tables.nodes.iter().map(|node| match node.node {
                Some(id) => format!("{} on node {id}", bytes(node.bytes)),
                None => format!("{} anywhere", bytes(node.bytes)),
            });
            let each: Vec<_> = each.collect();
            [
                bytes(tables.leaf_bytes),
                count(tables.entries),
                each.join(", "),
            ]
        }));
        sheet.table(&rows);
    }
}

fn domains(sheet: &mut Sheet, policy: &PolicyPlan) {
    for (place, domain) in policy.domains.iter().enumerate() {
        let node = match domain.node {
            Some(node) => format!("tables on node {node}"),
            None => "tables anywhere".into(),
        };
        let devices = counted(domain.devices.len() as u64, "device");
        let units = domain.units.join(" ");
        sheet.value(
            &format!("domain {place}"),
            &format!("{node}, walked by {units} for {devices}"),
        );
    }
}

fn notes(sheet: &mut Sheet, plan: &Plan) {
    let paint = sheet.paint();
    if !(plan.without_memory.is_empty()
        && plan.mixed_groups.is_empty()
        && plan.untranslated.is_empty())
    {
        sheet.gap();
    }
    let mut note = |text: String| sheet.marked("note", |mark| paint.warning(mark), "!", &text);
    for fallback in &plan.without_memory {
        let node = fallback.node;
        note(match fallback.tables_on {
            Some(on) => {
                format!("node {node} has no memory: tables for its devices lie on node {on}")
            }
            None => format!("node {node} has no memory, and no other node is known to have any"),
        });
    }
    for group in &plan.mixed_groups {
        note(format!(
            "the devices of group {group} have different nodes; it is not divided"
        ));
    }
    if !plan.untranslated.is_empty() {
        note(format!(
            "no unit translates for {}",
            plan.untranslated.join(", ")
        ));
    }
}

/// A load on a machine.
pub(crate) fn simulated(found: &Simulated, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    sheet.section("machine");
    let units = counted(found.units as u64, "unit");
    sheet.value("nodes", &format!("{}; {units} with devices", found.nodes));
    let assumed = match found.links_assumed {
        0 => String::new(),
        links => format!(
            "; {} assumed, {} GB/s",
            counted(links as u64, "link"),
            gigabytes(found.assumed_bytes_per_second)
        ),
    };
    sheet.value(
        "devices",
        &format!("{}, all at once{assumed}", found.devices),
    );
    let does = match found.traffic {
        Traffic::Streams => format!(
            "streams: each device goes through {STREAMS} buffers of {}, page by page",
            bytes(BUFFER)
        ),
        Traffic::Random => "random: each device has 64 reads of 512 bytes under way".into(),
    };
    sheet.value("load", &format!("{does}, in {}", bytes(found.memory_bytes)));
    sheet.section("simulated GB/s, not measured");
    let head = [
        "leaves", "tables", "all", "slowest", "reads", "remote", "bytes",
    ];
    let mut rows = vec![head.map(String::from)];
    rows.extend(found.rows.iter().map(|row| {
        [
            bytes(row.leaf_bytes),
            row.placement.clone(),
            gigabytes(row.bytes_per_second),
            gigabytes(row.slowest_bytes_per_second),
            format!("{:.2}", row.reads_per_request),
            format!("{:.0} %", row.remote_share * 100.0),
            bytes(row.table_bytes),
        ]
    }));
    sheet.table(&rows);
    sheet.gap();
    sheet.value("reads", "table entries that a request reads");
    sheet.value("remote", "share of these entries on another node");
    helps(&mut sheet, &found.rows);
    sheet.into_text()
}

/// The changes to one shared table of small leaves, the best first.
fn helps(sheet: &mut Sheet, rows: &[LoadRow]) {
    let Some((today, others)) = rows.split_first() else {
        return;
    };
    sheet.section(&format!(
        "gain over leaves of {} in one table",
        bytes(today.leaf_bytes)
    ));
    let mut gains: Vec<(f64, String)> = Vec::new();
    for row in others {
        let gain = row.bytes_per_second / today.bytes_per_second;
        // Less than the simulation is good for, beside what is changed more easily.
        let best = gains.iter().map(|gain| gain.0).fold(1.0, f64::max);
        if gain < 1.02 * best {
            continue;
        }
        let leaves = (row.leaf_bytes != today.leaf_bytes)
            .then(|| format!("leaves of {}", bytes(row.leaf_bytes)));
        let tables = (row.placement != today.placement).then(|| "a table on each node".into());
        let change: Vec<String> = [leaves, tables].into_iter().flatten().collect();
        gains.push((gain, change.join(" and ")));
    }
    if gains.is_empty() {
        sheet.value("nothing", "links are the limit");
    }
    for (gain, change) in gains.into_iter().rev() {
        sheet.value(&format!("{gain:.2} times"), &change);
    }
}

/// What was published, simulated.
pub(crate) fn published(simulated: &Published, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    for study in &simulated.studies {
        one(&mut sheet, study);
    }
    heat_map(&mut sheet, &simulated.heat_map);
    sheet.into_text()
}

fn one(sheet: &mut Sheet, study: &Study) {
    sheet.section(&format!("{} (simulated)", study.title));
    let mut rows = vec![["", "published", "simulated", "off by", ""].map(String::from)];
    rows.extend(study.rows.iter().map(row));
    sheet.table(&rows);
    let counting = study.counting().count();
    let reproduced = study.counting().filter(|row| row.is_reproduced()).count();
    let tolerance = TOLERANCE * 100.0;
    sheet.line(&format!(
        "  {reproduced} of {counting} counted rows are within {tolerance} %"
    ));
    sheet.gap();
    let mut rows = vec![["input", "value", "unit", "is"].map(String::from)];
    rows.extend(study.inputs.iter().map(|input| {
        let (is, from) = match input.basis {
            Basis::Published(from) => ("published", from),
            Basis::Fitted(to) => ("fitted to", to),
            Basis::Assumed(why) => ("assumed", why),
        };
        let value = format!("{}", input.value);
        [
            input.name.into(),
            value,
            input.unit.into(),
            format!("{is}: {from}"),
        ]
    }));
    sheet.table(&rows);
    sheet.gap();
    let mut rows = vec![["assumed input", "changed to", "rows move by"].map(String::from)];
    rows.extend(study.spread.iter().map(|spread| {
        let (lowest, highest) = (signed(spread.lowest), signed(spread.highest));
        let moved = format!("{lowest} to {highest}");
        [spread.input.into(), format!("{:.1}", spread.value), moved]
    }));
    sheet.table(&rows);
}

fn row(row: &Row) -> [String; 5] {
    let standing = match row.standing {
        Standing::Counts if row.is_reproduced() => "reproduced",
        Standing::Counts => "not reproduced",
        Standing::Fitted => "fitted, not counted",
        Standing::Follows => "follows from fit, not counted",
    };
    [
        row.name.clone(),
        format!("{:.1}", row.published),
        format!("{:.1}", row.simulated),
        signed(row.off()),
        standing.into(),
    ]
}

/// A part as a percentage with its sign.
fn signed(part: f64) -> String {
    // Not "-0.0 %".
    let percent = (part * 1000.0).round() / 10.0 + 0.0;
    format!("{percent:+.1} %")
}

fn heat_map(sheet: &mut Sheet, map: &HeatMap) {
    let memory = bytes(map.memory_bytes);
    sheet.section(&format!(
        "{} devices in {memory}: GB/s of all, one table and one per node (simulated)",
        map.devices
    ));
    let head = [
        "traffic", "leaves", "nodes", "shared", "per node", "times", "reads", "remote", "tables",
        "per node",
    ];
    let mut rows = vec![head.map(String::from)];
    rows.extend(map.cells.iter().map(|cell| {
        [
            cell.traffic.to_string(),
            bytes(cell.leaf_bytes),
            cell.nodes.to_string(),
            gigabytes(cell.shared_bytes_per_second),
            gigabytes(cell.per_node_bytes_per_second),
            format!("{:.2}", cell.gain()),
            format!("{:.2}", cell.reads_per_request),
            format!("{:.0} %", cell.remote_share * 100.0),
            bytes(cell.shared_table_bytes),
            bytes(cell.per_node_table_bytes),
        ]
    }));
    sheet.table(&rows);
    sheet.gap();
    sheet.value("reads", "table entries that a request reads with one table");
    sheet.value("remote", "share of these entries on another node");
}
