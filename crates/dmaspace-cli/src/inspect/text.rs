//! A process, or the machine, as text; a process as a picture.

use crate::inspect::{AreaReport, Ats, FormatCost, MachineReport, Missing, ProcessReport};

use crate::draw::histogram;
use crate::draw::sheet::{Paint, Sheet};
use crate::draw::svg;
use crate::size::{bytes, count, counted, duration, percent};

/// The whole report of a process.
pub(crate) fn process(found: &ProcessReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    sheet.section(&format!("process {} ({})", found.pid, found.name));
    if found.ended {
        let mark = |text: &str| paint.warning(text);
        sheet.marked("ended", mark, "!", "while it was looked at: this is a part");
    }
    sheet.value("addresses", &bytes(found.virtual_bytes));
    sheet.value(
        "mappable",
        &format!(
            "{}, of which {} ({}) are present",
            bytes(found.mappable_bytes),
            bytes(found.present_bytes),
            percent(found.present_bytes, found.mappable_bytes)
        ),
    );
    for kind in &found.kinds {
        let name = format!("{:?}", kind.kind).to_lowercase();
        sheet.value(&name, &bytes(kind.bytes));
    }
    sheet.value("locked", &bytes(found.locked_bytes));
    sheet.value("pinned", &bytes(found.pinned_bytes));
    let limit = match (found.limit.lifted, found.limit.memlock_bytes) {
        (true, _) => "none applies (CAP_IPC_LOCK)".into(),
        (false, Some(limit)) => format!("{} (RLIMIT_MEMLOCK)", bytes(limit)),
        (false, None) => "unlimited, or not known".into(),
    };
    sheet.value("limit", &limit);
    backing(&mut sheet, found);
    costs(&mut sheet, found);
    areas(&mut sheet, &found.areas);
    advice(&mut sheet, found);
    unknown(&mut sheet, &found.missing);
    sheet.into_text()
}

fn backing(sheet: &mut Sheet, found: &ProcessReport) {
    sheet.section("backing");
    for (name, classes) in [("folios", &found.folios), ("entries", &found.entries)] {
        for (nth, class) in classes.iter().rev().enumerate() {
            let share = percent(class.bytes, found.present_bytes);
            let name = if nth == 0 { name } else { "" };
            let (page, all) = (bytes(class.page_bytes), bytes(class.bytes));
            sheet.value(name, &format!("{page:<8} {all} ({share})"));
        }
    }
    for (nth, (node, amount)) in found.nodes.iter().enumerate() {
        let node = node.map_or("unknown".into(), |node| node.to_string());
        let name = if nth == 0 { "nodes" } else { "" };
        sheet.value(name, &format!("{node:<8} {}", bytes(*amount)));
    }
    if let Some(runs) = &found.runs {
        let largest = bytes(runs.largest_bytes);
        sheet.value(
            "runs",
            &format!("{}, the largest {largest}", count(runs.count)),
        );
        histogram::histogram(sheet, &runs.classes);
    }
}

fn costs(sheet: &mut Sheet, found: &ProcessReport) {
    if found.costs.is_empty() {
        return;
    }
    sheet.section("mapping what is present for a device");
    sheet.value("charge", &bytes(found.present_bytes));
    if let Some(ns) = found.pin_ns {
        sheet.value("pin", &format!("{}, predicted", duration(ns)));
    }
    for cost in &found.costs {
        sheet.value(&cost.format, &one_cost(cost));
    }
}

fn one_cost(cost: &FormatCost) -> String {
    let leaves: Vec<_> = cost
        .leaves
        .iter()
        .rev()
        .map(|leaf| format!("{} × {}", count(leaf.count), bytes(leaf.page_bytes)))
        .collect();
    let time = cost.map_ns.map_or(String::new(), |ns| {
        format!(", {} to map (predicted)", duration(ns))
    });
    format!(
        "{} leaves ({}), {} of tables{time}; 64 IOTLB entries reach {}",
        count(cost.leaf_count),
        leaves.join(", "),
        bytes(cost.table_bytes),
        bytes(cost.reach_64_bytes)
    )
}

fn areas(sheet: &mut Sheet, areas: &[AreaReport]) {
    let shown: Vec<_> = areas
        .iter()
        .filter(|area| area.present_bytes > 0)
        .take(10)
        .collect();
    if shown.is_empty() {
        return;
    }
    sheet.section("largest areas");
    for found in shown {
        let area = &found.area;
        let name = if area.name.is_empty() {
            "anonymous"
        } else {
            &area.name
        };
        let runs = found.runs.map(|runs| format!(", {}", counted(runs, "run")));
        sheet.line(&format!(
            "  {:#x} + {}: {} present, {} in huge pages{}  {name}",
            area.address,
            bytes(area.bytes),
            bytes(found.present_bytes),
            percent(found.huge_bytes, found.present_bytes),
            runs.unwrap_or_default(),
        ));
    }
}

fn advice(sheet: &mut Sheet, found: &ProcessReport) {
    sheet.section("what would help");
    if found.advice.is_empty() {
        sheet.value("nothing", "that is known here");
    }
    for (nth, advice) in found.advice.iter().enumerate() {
        sheet.value(&format!("{}.", nth + 1), &advice.finding);
        sheet.value("", &format!("by: {}", advice.setting));
    }
}

fn unknown(sheet: &mut Sheet, missing: &[Missing]) {
    if missing.is_empty() {
        return;
    }
    sheet.section("not known");
    for missing in missing {
        sheet.value(missing.what, &missing.why);
    }
}

/// What is present, by the size of the pages.
pub(crate) fn picture(found: &ProcessReport) -> String {
    let title = format!(
        "{} ({}): {} present of {}",
        found.name,
        found.pid,
        bytes(found.present_bytes),
        bytes(found.mappable_bytes)
    );
    let subtitle = match &found.runs {
        Some(runs) => counted(runs.count, "run"),
        None => "runs are not known without CAP_SYS_ADMIN".into(),
    };
    svg::picture(&title, &subtitle, &found.layout)
}

/// The whole report of the machine.
pub(crate) fn machine(found: &MachineReport, paint: Paint) -> String {
    let mut sheet = Sheet::new(paint);
    sheet.section("kernel");
    let options = match found.options.as_slice() {
        [] => "none that concern IOMMUs or huge pages".into(),
        options => options.join(" "),
    };
    sheet.value("options", &options);
    sheet.section("units");
    match found.units.is_empty() {
        true if found.knows_units() => sheet.value("none", "no IOMMU is in use"),
        true => sheet.value("not known", "see below"),
        false => {}
    }
    for unit in &found.units {
        let node = unit.node.map_or("unknown".into(), |node| node.to_string());
        let mut text = format!("{}, node {node}", counted(unit.devices, "device"));
        if !unit.can.is_empty() {
            text += &format!(": {}", unit.can.join(", "));
        }
        sheet.value(&unit.name, &text);
        if !unit.counters.is_empty() {
            sheet.value("", &format!("counters: {}", unit.counters.join(", ")));
        }
    }
    if !found.groups.is_empty() {
        sheet.section("groups");
    }
    for group in &found.groups {
        let domain = group.domain.as_deref().unwrap_or("unknown");
        for (nth, device) in group.devices.iter().enumerate() {
            let name = if nth == 0 {
                group.group.to_string()
            } else {
                String::new()
            };
            let node = device.node.map_or("-".into(), |node| node.to_string());
            let ats = match device.ats {
                Some(Ats::On) => ", ATS on",
                Some(Ats::Off) => ", ATS off",
                Some(Ats::None) | None => "",
            };
            let unit = device.unit.as_deref().unwrap_or("-");
            let (address, class) = (&device.address, &device.class);
            sheet.value(
                &name,
                &format!("{domain:<10} {address} {class}, {unit}, node {node}{ats}"),
            );
        }
    }
    if found.fault_count > 0 {
        sheet.section("faults");
        for line in &found.faults {
            sheet.line(&format!("  {line}"));
        }
    }
    sheet.section("findings");
    if found.findings.is_empty() {
        let good = |text: &str| paint.good(text);
        match found.missing.is_empty() {
            true => sheet.marked("", good, "✓", "nothing that a setting would change"),
            false => sheet.value("", "nothing in what is known"),
        }
    }
    for finding in &found.findings {
        let mark = |text: &str| paint.warning(text);
        sheet.marked("", mark, "!", &finding.finding);
        sheet.value("", &format!("by: {}", finding.setting));
    }
    unknown(&mut sheet, &found.missing);
    sheet.into_text()
}

#[cfg(test)]
mod tests {
    use crate::inspect::{
        Advice, Area, AreaKind, FolioReport, GroupDevice, GroupReport, KindReport, LeafCount,
        Limit, MachineFinding, RunsReport, UnitReport,
    };
    use crate::map::SizeClass;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn monitor() -> ProcessReport {
        let class = |page_bytes, bytes| FolioReport { page_bytes, bytes };
        ProcessReport {
            pid: 4711,
            name: "qemu-system-x86".into(),
            virtual_bytes: 5 << 30,
            mappable_bytes: 4 << 30,
            present_bytes: 1025 * MIB,
            pinned_bytes: MIB,
            limit: Limit {
                memlock_bytes: Some(8 * MIB),
                lifted: false,
            },
            kinds: vec![KindReport {
                kind: AreaKind::Anonymous,
                bytes: 1025 * MIB,
            }],
            folios: vec![class(4096, MIB), class(64 << 10, 1024 * MIB)],
            entries: vec![class(4096, 1025 * MIB)],
            nodes: vec![(Some(0), 1025 * MIB)],
            runs: Some(RunsReport {
                count: 16_640,
                largest_bytes: 64 << 10,
                classes: vec![
                    SizeClass {
                        from_bytes: 4096,
                        count: 256,
                        bytes: MIB,
                    },
                    SizeClass {
                        from_bytes: 64 << 10,
                        count: 16_384,
                        bytes: 1024 * MIB,
                    },
                ],
            }),
            costs: vec![FormatCost {
                format: "vtd-ss".into(),
                leaves: vec![LeafCount {
                    page_bytes: 4096,
                    count: 262_400,
                }],
                leaf_count: 262_400,
                tables: 517,
                table_bytes: 517 * 4096,
                reach_64_bytes: 256 << 10,
                map_ns: Some(1_234_567),
                runs: 16_640,
            }],
            pin_ns: Some(25_000_000),
            advice: vec![Advice {
                finding: "100 % of the memory is in pages of less than 2 MiB: with pages of 2 MiB \
                    leaves fall from 262,400 to 768"
                    .into(),
                setting: "madvise(MADV_HUGEPAGE) before it is touched".into(),
                leaves: Some((262_400, 768)),
            }],
            areas: vec![AreaReport {
                area: Area {
                    address: 0x7f00_0000_0000,
                    bytes: 4 << 30,
                    kind: AreaKind::Anonymous,
                    name: String::new(),
                    page_bytes: 4096,
                    locked_bytes: 0,
                    asks_for_huge: false,
                    refuses_huge: false,
                    mappable: true,
                },
                present_bytes: 1025 * MIB,
                huge_bytes: 0,
                runs: Some(16_640),
            }],
            missing: vec![Missing {
                what: "nodes",
                why: "there is no numa_maps".into(),
            }],
            ..ProcessReport::default()
        }
    }

    #[test]
    fn a_monitor_as_people_read_it() {
        let text = process(&monitor(), Paint::Plain);
        assert_eq!(text, MONITOR.trim_start_matches('\n'), "\n{text}");
    }

    #[test]
    fn what_takes_privilege_is_unknown_and_not_nothing() {
        let mut found = monitor();
        found.areas[0].runs = None;
        found.missing[0].what = "runs, leaves, folios";
        let text = process(&found, Paint::Plain);
        for part in [
            "1.00 GiB present, 0 % in huge pages  anonymous\n",
            "\n  runs, leaves, folios\n              there is no numa_maps\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_machine_as_people_read_it() {
        let device = |address: &str, ats| GroupDevice {
            address: address.into(),
            class: "Ethernet".into(),
            node: Some(1),
            unit: Some("dmar0".into()),
            ats,
        };
        let report = MachineReport {
            options: vec!["intel_iommu=on".into()],
            units: vec![UnitReport {
                name: "dmar0".into(),
                node: Some(1),
                devices: 2,
                can: vec!["2 MiB pages".into(), "1 GiB pages".into()],
                counters: vec!["iotlb_hit".into()],
            }],
            groups: vec![GroupReport {
                group: 7,
                domain: Some("DMA-FQ".into()),
                devices: vec![
                    device("0000:00:03.0", Some(Ats::On)),
                    device("0000:00:03.1", None),
                ],
            }],
            faults: vec!["DMAR: [DMA Write NO_PASID] fault".into()],
            fault_count: 1,
            findings: vec![MachineFinding {
                finding: "transparent huge pages are off".into(),
                setting: "echo madvise > enabled".into(),
            }],
            missing: Vec::new(),
        };
        let text = machine(&report, Paint::Plain);
        assert_eq!(text, MACHINE.trim_start_matches('\n'), "\n{text}");
    }

    #[test]
    fn a_machine_that_is_not_shown_is_not_said_to_have_no_iommu() {
        let missing = Missing {
            what: "IOMMU",
            why: "nothing is mounted at /sys".into(),
        };
        let found = MachineReport {
            missing: vec![missing],
            ..MachineReport::default()
        };
        let text = machine(&found, Paint::Plain);
        assert!(!text.contains("no IOMMU"), "{text}");
        for line in [
            "  not known   see below",
            "              nothing in what is known",
            "  IOMMU       nothing is mounted at /sys",
        ] {
            assert!(text.lines().any(|found| found == line), "{text}");
        }
    }

    const MONITOR: &str = r"
process 4711 (qemu-system-x86)
  addresses   5 GiB
  mappable    4 GiB, of which 1.00 GiB (25.0 %) are present
  anonymous   1.00 GiB
  locked      0 B
  pinned      1 MiB
  limit       8 MiB (RLIMIT_MEMLOCK)

backing
  folios      64 KiB   1 GiB (99.9 %)
              4 KiB    1 MiB (0.1 %)
  entries     4 KiB    1.00 GiB (100 %)
  nodes       0        1.00 GiB
  runs        16,640, the largest 64 KiB
               4 KiB  ×    256     1 MiB  ▏
              64 KiB  × 16,384     1 GiB  ███████████████████████▉

mapping what is present for a device
  charge      1.00 GiB
  pin         25.0 ms, predicted
  vtd-ss      262,400 leaves (262,400 × 4 KiB), 2.02 MiB of tables, 1.23 ms to
              map (predicted); 64 IOTLB entries reach 256 KiB

largest areas
  0x7f0000000000 + 4 GiB: 1.00 GiB present, 0 % in huge pages, 16,640 runs  anonymous

what would help
  1.          100 % of the memory is in pages of less than 2 MiB: with pages of
              2 MiB leaves fall from 262,400 to 768
              by: madvise(MADV_HUGEPAGE) before it is touched

not known
  nodes       there is no numa_maps
";

    const MACHINE: &str = r"
kernel
  options     intel_iommu=on

units
  dmar0       2 devices, node 1: 2 MiB pages, 1 GiB pages
              counters: iotlb_hit

groups
  7           DMA-FQ     0000:00:03.0 Ethernet, dmar0, node 1, ATS on
              DMA-FQ     0000:00:03.1 Ethernet, dmar0, node 1

faults
  DMAR: [DMA Write NO_PASID] fault

findings
              ! transparent huge pages are off
              by: echo madvise > enabled
";
}
