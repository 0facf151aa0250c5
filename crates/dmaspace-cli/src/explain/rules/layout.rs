//! Guest memory against what the host can map.

use std::collections::BTreeMap;

use dmaspace::layout::{AreaPlace, Bar, LayoutReport, ReservedRange, check};

use super::super::facts::{Facts, Known, LayoutArea, Line};
use super::super::finding::{Advice, Certainty, Evidence, Finding};
use crate::inspect::needs::{self, Available};

const EINVAL: i32 = 22;
/// Addresses that units of small machines do not translate: 39 bits (VT-d 5.0, section 10.4.2, SAGAW, MGAW).
const HIGH: u64 = 1 << 39;
/// Reserved by hosts of AMD. Source: AMD 48882 3.08, section 2.1.2; Linux `drivers/iommu/amd/iommu.c`,
/// `amd_iommu_get_resv_regions` (HT_RANGE_START, HT_RANGE_END).
const HYPERTRANSPORT: std::ops::RangeInclusive<u64> = 0xfd_0000_0000..=0xff_ffff_ffff;
const SOURCE: &str = "Linux drivers/vfio/vfio_iommu_type1.c, vfio_iommu_iova_dma_valid; drivers/iommu/iommufd/io_pagetable.c, iopt_check_iova; drivers/iommu/intel/iommu.c, paging_domain_compatible";

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    areas(facts, found);
    configured(facts, found);
    lines(facts, found);
    without_address(facts, found);
}

/// As [`last`], for layouts: a driver's line is of the same machine where the address that it names is one of the
/// layout.
fn end_of_areas(facts: &Facts) -> Option<(u64, &Evidence)> {
    let within = |address: u64| {
        let mut areas = facts.areas.iter().map(|one| &one.fact);
        areas.any(|area| address >= area.first && address - area.first < area.length)
    };
    let of_layout = facts.lines.iter().any(
        |one| matches!(one.fact, Line::Width { address: Some(address), .. } if within(address)),
    );
    last(facts).filter(|_| of_layout || !facts.apertures.is_empty())
}

/// The last address that is translated, and what says so.
fn last(facts: &Facts) -> Option<(u64, &Evidence)> {
    let given = facts.apertures.iter().max_by_key(|one| one.fact.1);
    let width = facts.lines.iter().find_map(|one| match one.fact {
        Line::Width { bits, .. } if bits < 64 => Some(((1u64 << bits) - 1, &one.evidence)),
        _ => None,
    });
    given.map(|one| (one.fact.1, &one.evidence)).or(width)
}

fn reserved(facts: &Facts) -> (Vec<ReservedRange>, Vec<&Evidence>) {
    let all = facts.reserved.iter().filter(|one| one.fact.0 <= one.fact.1);
    let all: Vec<_> = all.take(1024).collect();
    let ranges = all
        .iter()
        .map(|one| ReservedRange::new(one.fact.2.clone(), one.fact.0..=one.fact.1));
    (
        ranges.collect(),
        all.iter().map(|one| &one.evidence).collect(),
    )
}

/// A layout of a file, beside what the machine translates.
struct Case<'a> {
    name: &'a str,
    /// The area of a place in the report.
    known: &'a dyn Fn(AreaPlace) -> Option<&'a Known<LayoutArea>>,
    report: &'a LayoutReport,
    /// The nearest layout that fits.
    fitting: Option<String>,
    certainty: Certainty,
    /// A condition under which it holds.
    provided: &'a str,
}

impl Case<'_> {
    /// Areas over reserved ranges.
    fn overlaps(&self, reserved: &[ReservedRange], places: &[&Evidence], found: &mut Vec<Finding>) {
        for overlap in &self.report.overlaps {
            let (Some(area), Some(kept)) =
                ((self.known)(overlap.area), reserved.get(overlap.reserved))
            else {
                continue;
            };
            let mut finding = Finding::new("layout.overlaps-reserved", self.certainty, SOURCE)
                .devices(area.fact.device.clone())
                .range(*overlap.range.start(), *overlap.range.end())
                .evidence([&area.evidence])
                .evidence(places.get(overlap.reserved).copied())
                .say(format!(
                    "{} of layout {} overlaps the host's reserved range {:#x} to {:#x} ({}) at {:#x} to {:#x}: a map \
                     of it ends with EINVAL.{}",
                    name(&area.fact),
                    self.name,
                    kept.range.start(),
                    kept.range.end(),
                    kept.name,
                    overlap.range.start(),
                    overlap.range.end(),
                    self.provided
                ));
            if let Some(advice) = &self.fitting {
                finding = finding.advise(Advice::text(advice.clone()));
            }
            found.push(finding.advise(Advice::text(
                "Tell the guest of the gap (memory map), and place 64-bit BARs above or below it.",
            )));
        }
    }

    /// Areas beyond the last address that is translated.
    fn beyond(&self, end: Option<(u64, &Evidence)>, found: &mut Vec<Finding>) {
        for beyond in &self.report.beyond {
            let Some(area) = (self.known)(beyond.area) else {
                continue;
            };
            let mut finding = Finding::new("layout.address-width", self.certainty, SOURCE)
                .devices(area.fact.device.clone())
                .range(*beyond.range.start(), *beyond.range.end())
                .evidence([&area.evidence])
                .evidence(end.map(|(_, evidence)| evidence))
                .say(format!(
                    "{} of layout {} lies beyond the translated range: {:#x} to {:#x}.{}",
                    name(&area.fact),
                    self.name,
                    beyond.range.start(),
                    beyond.range.end(),
                    self.provided
                ));
            if let Some(advice) = &self.fitting {
                finding = finding.advise(Advice::text(advice.clone()));
            }
            found.push(finding.advise(narrow(end.map(|(last, _)| last))));
        }
    }
}

fn areas(facts: &Facts, found: &mut Vec<Finding>) {
    let mut cases: BTreeMap<&str, Vec<&Known<LayoutArea>>> = BTreeMap::new();
    for area in facts.areas.iter().filter(|one| one.fact.length > 0) {
        cases.entry(&area.fact.case).or_default().push(area);
    }
    let (reserved, places) = reserved(facts);
    let (first, end) = (
        facts
            .apertures
            .iter()
            .map(|one| one.fact.0)
            .min()
            .unwrap_or(0),
        end_of_areas(facts),
    );
    // Arithmetic on two files says something of a machine only where both are of one.
    let (certainty, provided) = match facts.of_one_machine() {
        true => (Certainty::Certain, ""),
        false => (
            Certainty::Likely,
            " The input is of several machines: it holds where both files are of one.",
        ),
    };
    for (case, areas) in cases {
        let range = |area: &LayoutArea| area.first..=area.first.saturating_add(area.length - 1);
        let (mut ram, mut bars, mut at_ram, mut at_bar) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for area in areas {
            match &area.fact.device {
                Some(device) => {
                    bars.push(Bar::new(device.clone(), range(&area.fact)));
                    at_bar.push(area);
                }
                None => {
                    ram.push(range(&area.fact));
                    at_ram.push(area);
                }
            }
        }
        let report = check(
            first..=end.map_or(u64::MAX, |(last, _)| last),
            &reserved,
            &ram,
            &bars,
        );
        let known = |area: AreaPlace| match area {
            AreaPlace::Ram(nth) => at_ram.get(nth).copied(),
            AreaPlace::Bar(nth) => at_bar.get(nth).copied(),
        };
        let found_of = Case {
            name: case,
            known: &known,
            report: &report,
            fitting: fitting(&report),
            certainty,
            provided,
        };
        found_of.overlaps(&reserved, &places, found);
        found_of.beyond(end, found);
    }
}

/// RAM of a configuration, as QEMU places it.
fn configured(facts: &Facts, found: &mut Vec<Finding>) {
    let ([one], true) = (facts.configurations.as_slice(), facts.of_one_machine()) else {
        return;
    };
    let (reserved, places) = reserved(facts);
    let given = facts.apertures.iter().max_by_key(|one| one.fact.1);
    let available = Available {
        reserved,
        last: given.map(|one| one.fact.1),
        ..Available::default()
    };
    for short in needs::layout(&one.fact, &available) {
        let place = short.reserved.and_then(|nth| places.get(nth).copied());
        let width = given.filter(|_| short.reserved.is_none());
        found.push(
            super::of_need(short)
                .evidence([&one.evidence])
                .evidence(place)
                .evidence(width.map(|one| &one.evidence)),
        );
    }
}

fn name(area: &LayoutArea) -> String {
    match &area.device {
        Some(device) => format!("The BAR of {device}"),
        None => "RAM".into(),
    }
}

/// The nearest layout that fits, in words.
fn fitting(report: &LayoutReport) -> Option<String> {
    let layout = report.fitting.as_ref()?;
    let range = |range: &std::ops::RangeInclusive<u64>| {
        format!("{:#x} to {:#x}", range.start(), range.end())
    };
    let ram = layout
        .ram
        .iter()
        .take(8)
        .map(|one| format!("RAM {}", range(one)));
    let bars = layout
        .bars
        .iter()
        .take(8)
        .map(|bar| format!("BAR of {} {}", bar.device, range(&bar.range)));
    let parts: Vec<_> = ram.chain(bars).collect();
    Some(format!(
        "The nearest layout that fits: {}.",
        parts.join(", ")
    ))
}

fn narrow(last: Option<u64>) -> Advice {
    let bits = last.map_or(39, |last| 64 - last.leading_zeros());
    Advice::text(format!(
        "Let the guest place BARs within {bits} bits: -cpu host,host-phys-bits-limit={bits} (libvirt: <maxphysaddr \
         mode='passthrough' limit='{bits}'/>); in a nested guest a wider virtual unit: -device intel-iommu,aw-bits=48."
    ))
}

/// Ranges that a monitor or a driver could not map.
fn lines(facts: &Facts, found: &mut Vec<Finding>) {
    let end = last(facts);
    let (reserved, places) = reserved(facts);
    let stated: Vec<_> = facts
        .lines
        .iter()
        .filter_map(|one| match one.fact {
            Line::Width { bits, address } => Some((bits, address, &one.evidence)),
            _ => None,
        })
        .collect();
    for (bits, address, evidence) in &stated {
        let mut finding = Finding::certain("layout.address-width", "Linux drivers/iommu/intel/iommu.c, intel_iommu_map (before 6.16)")
            .evidence([*evidence])
            .say(format!(
                "The unit, or the domain's table, translates {bits} bits, and the address that was to be mapped needs more."
            ))
            .advise(narrow((*bits < 64).then(|| (1u64 << bits) - 1)));
        if let Some(address) = address {
            finding = finding.range(*address, *address);
        }
        found.push(finding);
    }
    for one in &facts.lines {
        let (first, last_byte) = match &one.fact {
            Line::MapFailed {
                iova: Some(iova),
                length,
                errno: EINVAL,
                ..
            } => (*iova, iova.saturating_add(length.unwrap_or(1).max(1) - 1)),
            Line::CannotMap { first, last } if first <= last => (*first, *last),
            _ => continue,
        };
        let report = check(
            0..=end.map_or(u64::MAX, |(last, _)| last),
            &reserved,
            &[first..=last_byte],
            &[],
        );
        for overlap in &report.overlaps {
            found.push(
                Finding::certain("layout.overlaps-reserved", SOURCE)
                    .range(*overlap.range.start(), *overlap.range.end())
                    .evidence([&one.evidence])
                    .evidence(places.get(overlap.reserved).copied())
                    .say(format!(
                        "The range {first:#x} to {last_byte:#x} that could not be mapped overlaps a reserved range of the \
                         host at {:#x} to {:#x}.",
                        overlap.range.start(),
                        overlap.range.end()
                    ))
                    .advise(Advice::text("Leave the reserved range out of the guest's memory and of its window of BARs.")),
            );
        }
        let last = end.map(|(last, _)| last);
        let Some((certainty, text)) = beyond(&report, last, first..=last_byte) else {
            continue;
        };
        found.push(
            Finding::new("layout.address-width", certainty, SOURCE)
                .range(first, last_byte)
                .evidence([&one.evidence])
                .evidence(end.map(|(_, evidence)| evidence))
                .say(text)
                .advise(narrow(last)),
        );
    }
}

/// A range that could not be mapped, and lies beyond what is translated: for certain, by a known `last` address, or as
/// one of the reasons for EINVAL. `None` where it does not.
fn beyond(
    report: &LayoutReport,
    last: Option<u64>,
    range: std::ops::RangeInclusive<u64>,
) -> Option<(Certainty, String)> {
    let (first, end) = range.into_inner();
    let certainty = match last {
        Some(_) if report.beyond.is_empty() => return None,
        Some(_) => Certainty::Certain,
        None if !report.overlaps.is_empty() => return None,
        // Both fit: the width, and the range that AMD's hosts reserve.
        None if first <= *HYPERTRANSPORT.end() && end >= *HYPERTRANSPORT.start() => {
            Certainty::Unknown
        }
        None if first >= HIGH => Certainty::Likely,
        None => return None,
    };
    let text = match last {
        Some(last) => format!(
            "The address {first:#x} needs {} bits, and the last address that is translated is {last:#x}.",
            64 - first.leading_zeros()
        ),
        None if certainty == Certainty::Unknown => format!(
            "A map at {first:#x} ended with EINVAL: hosts of AMD reserve 0xfd00000000 to 0xffffffffff, and \
             narrow units end below; reserved_regions of the group, or the aperture, decides."
        ),
        None => format!(
            "A map at {first:#x} ended with EINVAL: likely the address, which needs {} bits, is beyond the unit's addresses; a reserved range of the host gives the same. The unit's width or its aperture decides.",
            64 - first.leading_zeros()
        ),
    };
    Some((certainty, text))
}

/// Maps that ended with EINVAL, and nothing tells at which address.
fn without_address(facts: &Facts, found: &mut Vec<Finding>) {
    let failed = facts.lines.iter().filter(|one| {
        matches!(
            one.fact,
            Line::MapFailed {
                iova: None,
                errno: EINVAL,
                ..
            }
        )
    });
    let failed: Vec<_> = failed.collect();
    let told = found.iter().any(|one| one.cause.starts_with("layout."));
    if failed.is_empty() || told {
        return;
    }
    found.push(
        Finding::new("layout.address-width", Certainty::Unknown, SOURCE)
            .evidence(failed.iter().map(|one| &one.evidence))
            .say(
                "A map for a device ended with EINVAL, and the line does not have its address: a reserved range of the \
                 host, or an address beyond the unit's addresses, fit both.",
            )
            .advise(Advice::text(
                "Give the monitor's memory layout with reserved_regions of the device's group.",
            ))
            .advise(Advice::command([
                "grep",
                "-r",
                ".",
                "/sys/kernel/iommu_groups",
                "--include=reserved_regions",
            ])),
    );
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Certainty;
    use super::super::{causes, of_text};

    #[test]
    fn files_of_several_machines_make_it_likely() {
        let text = "A ram 0x0 0xfee01000\n0x00000000fee00000 0x00000000feefffff msi\n";
        assert_eq!(of_text(text)[0].certainty, Certainty::Certain);
        let units =
            "[    1.5] AMD-Vi: Using global IVHD EFR:0x1\n[    1.5] DMAR: Host address width 39\n";
        let found = of_text(&format!("{units}{text}"));
        assert_eq!(causes(&found), ["layout.overlaps-reserved"]);
        assert_eq!(found[0].certainty, Certainty::Likely);
    }

    #[test]
    fn overlaps_are_the_common_part_of_each_area() {
        let found = of_text(
            "0x00000000fee00000 0x00000000feefffff msi\nX ram 0x0 0xfee01000\nY ram 0x0 0x80000000\nX bar 0000:01:00.0 0xfef00000 0x1000\n",
        );
        assert_eq!(causes(&found), ["layout.overlaps-reserved"]);
        assert_eq!(found[0].addresses, [(0xfee0_0000, 0xfee0_0fff)]);
        assert!(found[0].devices.is_empty());
    }

    #[test]
    fn a_width_that_is_known_makes_it_certain() {
        let line =
            "vfio_dma_map(0x5581, 0x380000000000, 0x1000, 0x7f00) = -22 (Invalid argument)\n";
        let alone = of_text(line);
        assert_eq!(
            (alone[0].cause, alone[0].certainty),
            ("layout.address-width", Certainty::Likely)
        );
        let given = of_text(&format!("0x0 0x7fffffffff\n{line}"));
        assert_eq!(given[0].certainty, Certainty::Certain);
        let wide = of_text(&format!("0x0 0xffffffffffff\n{line}"));
        assert_eq!(causes(&wide), [""; 0]);
        let low =
            of_text("vfio_dma_map(0x5581, 0x1000, 0x1000, 0x7f00) = -22 (Invalid argument)\n");
        assert_eq!(causes(&low), [""; 0]);
    }

    #[test]
    fn a_configuration_has_the_layout_that_qemu_makes() {
        let line = |machine: &str, memory: &str| {
            format!(
                "qemu-system-x86_64 -machine {machine} -m {memory} -mem-path /dev/hugepages -device vfio-pci,host=01:00.0\n"
            )
        };
        let hole = "0x00000000fee00000 0x00000000feefffff msi\n0x000000fd00000000 0x000000ffffffffff reserved\n";
        let found = of_text(&(line("pc-q35-6.2", "1100G") + hole));
        assert_eq!(causes(&found), ["layout.overlaps-reserved"]);
        assert_eq!(found[0].addresses, [(0xfd_0000_0000, 0xff_ffff_ffff)]);
        assert_eq!(found[0].evidence.len(), 2);
        let layouts = |text: String| {
            let found = of_text(&text);
            found
                .iter()
                .filter(|one| one.cause.starts_with("layout."))
                .count()
        };
        assert_eq!(layouts(line("pc-q35-9.0", "1100G") + hole), 0);
        assert_eq!(layouts(line("pc-q35-6.2", "900G") + hole), 0);
        let narrow = of_text(&(line("q35", "600G") + "0x0 0x7fffffffff\n"));
        assert_eq!(
            (narrow[0].cause, narrow[0].certainty),
            ("layout.address-width", Certainty::Certain)
        );
        assert_eq!(layouts(line("q35", "500G") + "0x0 0x7fffffffff\n"), 0);
    }
}
