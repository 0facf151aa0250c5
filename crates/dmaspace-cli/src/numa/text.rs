//! Plans of nodes as text.

use crate::draw::sheet::{Paint, Sheet};
use crate::numa::plan::{Plan, PolicyPlan, name};
use crate::size::{bytes, count, counted, three_digits};

/// Stand-in for an unknown value.
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

/// Predicted throughput of devices under each policy.
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
