//! Lines of files whose form is one of sysfs, procfs, or of `docs/explain.md`: groups, iomem, reserved regions,
//! apertures, layouts, pools, hosts, traces, series.

use super::super::facts::{Driver, Facts, LayoutArea, Member, Point, Step};
use super::super::finding::quote;
use super::super::number::{hexadecimal, number, number_after, pci};
use crate::inspect::needs::CountedPool;

/// Takes a line without a log's prefix; false: it is of none of these forms.
pub(in crate::explain) fn line(facts: &mut Facts, file: usize, at: u64, text: &str) -> bool {
    let words: Vec<&str> = text.split_whitespace().take(16).collect();
    let Some(first) = words.first() else {
        return true;
    };
    let evidence = quote(file, at, text);
    if iomem(facts, text, &evidence) {
        facts.content(file, "/proc/iomem");
    } else if let Some((node, page, free)) = pool(text) {
        facts.content(file, "huge page pools");
        let pool = CountedPool {
            node,
            page_bytes: page,
            free,
            growth: 0,
        };
        Facts::push(
            &mut facts.pools,
            &mut facts.dropped,
            "pools",
            pool,
            evidence,
        );
    } else if let Some((group, device)) = member(text) {
        facts.content(file, "IOMMU groups");
        let member = Member { group, device };
        Facts::push(
            &mut facts.members,
            &mut facts.dropped,
            "members",
            member,
            evidence,
        );
    } else if group_row(facts, &words, &evidence) {
        facts.content(file, "IOMMU groups");
    } else if let Some((device, driver)) = driver_link(text) {
        facts.content(file, "drivers of devices");
        if let Some(function) = facts.function(&device, &evidence) {
            function.driver = Driver::Bound(driver);
        }
    } else if let Some((group, region)) = region(&words) {
        facts.content(file, "reserved_regions");
        if let Some(group) = group {
            facts.region_groups.insert(evidence.place.clone(), group);
        }
        Facts::push(
            &mut facts.reserved,
            &mut facts.dropped,
            "regions",
            region,
            evidence,
        );
    } else if let Some(aperture) = aperture(&words) {
        facts.content(file, "aperture");
        Facts::push(
            &mut facts.apertures,
            &mut facts.dropped,
            "apertures",
            aperture,
            evidence,
        );
    } else if let Some(context) = context(&words) {
        facts.content(file, "debugfs dmar_translation_struct");
        Facts::push(
            &mut facts.contexts,
            &mut facts.dropped,
            "context entries",
            context,
            evidence,
        );
    } else if let Some(area) = area(&words) {
        facts.content(file, "memory layout");
        Facts::push(
            &mut facts.areas,
            &mut facts.dropped,
            "areas",
            area,
            evidence,
        );
    } else if let Some(node) = device_node(&words) {
        facts.content(file, "host");
        Facts::push(
            &mut facts.device_nodes,
            &mut facts.dropped,
            "nodes",
            node,
            evidence,
        );
    } else if let Some(bytes) = page_size(&words) {
        facts.content(file, "host");
        facts.host_page = Some(super::super::facts::Known {
            fact: bytes,
            evidence,
        });
    } else if let Some(step) = step(&words, text) {
        facts.content(file, "trace");
        Facts::push(
            &mut facts.steps,
            &mut facts.dropped,
            "steps",
            step,
            evidence,
        );
    } else if let Some(point) = point(
        &words,
        facts
            .targets
            .iter()
            .any(|one| one.evidence.place.file == file),
    ) {
        facts.content(file, "balloon series");
        Facts::push(
            &mut facts.series,
            &mut facts.dropped,
            "points",
            point,
            evidence,
        );
    } else if first.starts_with('#') {
        return comment(facts, file, text, evidence);
    } else {
        return heading(&words);
    }
    true
}

/// `0x00000000fee00000 0x00000000feefffff msi`, also as `grep` prints it behind the path of its group.
fn region(words: &[&str]) -> Option<(Option<u32>, (u64, u64, String))> {
    let [first, last, name] = words else {
        return None;
    };
    let (group, first) = match first.rsplit_once(':') {
        Some((path, first)) => (Some(group_of_regions(path)?), first),
        None => (None, *first),
    };
    let known = ["direct", "direct-relaxable", "reserved", "msi"].contains(name);
    let region = known.then_some((number(first)?, number(last)?, (*name).to_owned()))?;
    Some((group, region))
}

/// The group of a path `.../iommu_groups/GROUP/reserved_regions`.
pub(in crate::explain) fn group_of_regions(path: &str) -> Option<u32> {
    let (path, group) = path.strip_suffix("/reserved_regions")?.rsplit_once('/')?;
    let of_group = path.rsplit('/').next() == Some("iommu_groups");
    of_group.then(|| group.parse().ok())?
}

/// `00:02.0 0x0:0x10370c001 0x102:0x10370e001 -1 ...`: device, root entry, context entry, each its high and low word.
/// Source: Linux 7.2 `drivers/iommu/intel/debugfs.c`, `ctx_tbl_walk`, `print_tbl_walk`.
fn context(words: &[&str]) -> Option<(String, u64)> {
    let [device, root, context, ..] = words else {
        return None;
    };
    let low = |pair: &str| {
        let (high, low) = pair.split_once(':')?;
        number(high)
            .and(number(low))
            .filter(|_| high.starts_with("0x"))
    };
    low(root)?;
    Some((pci(device)?, low(context)?))
}

/// `0x0 0x7fffffffff`.
fn aperture(words: &[&str]) -> Option<(u64, u64)> {
    let [first, last] = words else {
        return None;
    };
    let hexadecimal = first.starts_with("0x") && last.starts_with("0x");
    hexadecimal.then_some((number(first)?, number(last)?))
}

/// `0000:19:00.0 gpu node 0`.
fn device_node(words: &[&str]) -> Option<(String, u32)> {
    match words {
        [device, _, "node", node] => Some((pci(device)?, node.parse().ok()?)),
        _ => None,
    }
}

/// `page-size 65536`.
fn page_size(words: &[&str]) -> Option<u64> {
    match words {
        ["page-size", bytes] => number(bytes),
        _ => None,
    }
}

/// Heads of these forms, which say nothing themselves.
fn heading(words: &[&str]) -> bool {
    let lower = words.iter().map(|word| word.to_ascii_lowercase());
    let lower: Vec<_> = lower.collect();
    let is = |names: &[&str]| {
        lower.len() >= names.len() && names.iter().zip(&lower).all(|(a, b)| a == b)
    };
    is(&["iommu"]) && words.get(2..5) == Some(&["Root", "Table", "Address:"])
        || is(&["b.d.f", "root_entry"])
        || is(&["group", "device", "class"])
        || is(&["case", "second"])
        || is(&["limit", "soft"])
}

/// `# target 2048`, `# A: target=2048 MiB`.
fn comment(
    facts: &mut Facts,
    file: usize,
    text: &str,
    evidence: super::super::finding::Evidence,
) -> bool {
    let lower = text.to_ascii_lowercase();
    let Some((before, rest)) = lower.split_once("target") else {
        return false;
    };
    let mut targets = Vec::new();
    // `target 2048`, `A: target=2048 MiB`, `target A 2048, B 4096`.
    let is_separator = |c: char| !(c.is_alphanumeric() || c == '-' || c == '_');
    let words = |part: &str| -> Vec<String> {
        let words = part.split(is_separator).filter(|word| !word.is_empty());
        words.take(64).map(str::to_owned).collect()
    };
    // The case keeps its letters.
    let at = lower.len() - rest.len();
    let (before, rest) = (
        words(text.get(..before.len()).unwrap_or_default()),
        words(text.get(at..).unwrap_or_default()),
    );
    let mut case = before.last().cloned();
    for word in &rest {
        match word.parse::<u64>() {
            Ok(target) => targets.push((case.take(), target)),
            Err(_) => case = Some(word.clone()),
        }
    }
    for target in targets {
        Facts::push(
            &mut facts.targets,
            &mut facts.dropped,
            "targets",
            target,
            evidence.clone(),
        );
    }
    facts.content(file, "balloon series");
    true
}

/// `00100000-ce2e3fff : System RAM`.
fn iomem(facts: &mut Facts, text: &str, evidence: &super::super::finding::Evidence) -> bool {
    let Some((range, name)) = text.trim().split_once(" : ") else {
        return false;
    };
    let Some((first, last)) = range.split_once('-') else {
        return false;
    };
    let digits = |text: &str| hexadecimal(text).filter(|_| (4..=16).contains(&text.len()));
    let (Some(first), Some(last)) = (digits(first), digits(last)) else {
        return false;
    };
    if first == 0 && last == 0 {
        facts.hidden_iomem = true;
        return true;
    }
    let area = (first, last, name.to_owned());
    Facts::push(
        &mut facts.iomem,
        &mut facts.dropped,
        "areas of iomem",
        area,
        evidence.clone(),
    );
    true
}

/// `/sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages:16`.
fn pool(text: &str) -> Option<(Option<u32>, u64, u64)> {
    let (path, count) = text.trim().rsplit_once("/free_hugepages:")?;
    let (path, size) = path.rsplit_once("/hugepages-")?;
    let page = size
        .strip_suffix("kB")?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)?;
    let node = path
        .strip_suffix("/hugepages")?
        .rsplit_once("/node")
        .and_then(|(_, node)| node.parse().ok());
    Some((node, page, count.trim().parse().ok()?))
}

/// `/sys/kernel/iommu_groups/1/devices/0000:00:01.0`, `IOMMU Group 1 00:01.0 PCI bridge ...`.
fn member(text: &str) -> Option<(u32, String)> {
    if let Some((_, rest)) = text.split_once("iommu_groups/") {
        let (group, rest) = rest.split_once('/')?;
        let device = rest.strip_prefix("devices/")?;
        let device = device
            .split([' ', '/', ':'])
            .count()
            .checked_sub(1)
            .and(device.split([' ', '/']).next())?;
        return Some((group.parse().ok()?, pci(device.trim_end_matches(':'))?));
    }
    let lower = text.trim_start();
    let rest = lower
        .strip_prefix("IOMMU Group ")
        .or_else(|| lower.strip_prefix("IOMMU group "))?;
    let (group, rest) = rest.split_once([' ', ':'])?;
    let device = rest.trim_start_matches([' ', ':', '-']).split(' ').next()?;
    Some((group.parse().ok()?, pci(device)?))
}

/// `GROUP DEVICE CLASS ID DRIVER [NODE]`.
fn group_row(
    facts: &mut Facts,
    words: &[&str],
    evidence: &super::super::finding::Evidence,
) -> bool {
    let [group, device, class, id, rest @ ..] = words else {
        return false;
    };
    let (Ok(group), Some(device)) = (group.parse::<u32>(), pci(device)) else {
        return false;
    };
    let class_code =
        hexadecimal(class.trim_start_matches("0x")).filter(|_| matches!(class.len(), 4 | 6 | 8));
    let (Some(class_code), Some((vendor, _))) = (class_code, id.split_once(':')) else {
        return false;
    };
    let member = Member {
        group,
        device: device.clone(),
    };
    Facts::push(
        &mut facts.members,
        &mut facts.dropped,
        "members",
        member,
        evidence.clone(),
    );
    if let Some(function) = facts.function(&device, evidence) {
        let code = if class.trim_start_matches("0x").len() == 4 {
            class_code << 8
        } else {
            class_code
        };
        function.class = u32::try_from(code).ok();
        function.vendor = hexadecimal(vendor).and_then(|vendor| u16::try_from(vendor).ok());
        function.driver = match rest.first() {
            None | Some(&("-" | "none" | "(none)" | "<none>" | "")) => Driver::None,
            Some(driver) => Driver::Bound((*driver).to_owned()),
        };
        function.node = rest.get(1).and_then(|node| node.parse().ok());
    }
    true
}

/// `/sys/bus/pci/devices/0000:01:00.0/driver -> ../../../bus/pci/drivers/vfio-pci`.
fn driver_link(text: &str) -> Option<(String, String)> {
    let (path, target) = text.split_once(" -> ")?;
    let device = path
        .trim_end()
        .strip_suffix("/driver")?
        .rsplit('/')
        .next()?;
    let driver = target.trim().rsplit_once("/drivers/")?.1;
    Some((pci(device)?, driver.to_owned()))
}

/// `A ram 0x0 0xc0000000`, `A bar 0000:01:00.0 0x8000000000 0x2000000000`.
fn area(words: &[&str]) -> Option<LayoutArea> {
    let (case, device, first, length) = match words {
        [case, "ram", first, length] => (case, None, first, length),
        [case, "bar", device, first, length] => (case, Some(pci(device)?), first, length),
        _ => return None,
    };
    Some(LayoutArea {
        case: (*case).to_owned(),
        device,
        first: number(first)?,
        length: number(length)?,
    })
}

fn step(words: &[&str], text: &str) -> Option<Step> {
    let (nth, rest) = words.split_first()?;
    nth.trim_end_matches(['.', ':', ')']).parse::<u64>().ok()?;
    let value = |key: &str| number_after(text, key);
    match rest {
        ["map", iova, length, ..] => Some(Step::Map {
            iova: number(iova)?,
            length: number(length)?,
        }),
        ["unmap", iova, length, ..] => Some(Step::Unmap {
            iova: number(iova)?,
            length: number(length)?,
        }),
        ["export-dmabuf", ..] => Some(Step::Export {
            bar: value("bar=")?,
        }),
        ["ioas-map-file", ..] => Some(Step::MapFile {
            iova: value("iova=")?,
            length: value("len=").or_else(|| value("length=")),
        }),
        ["config-write", "command", ..] => Some(Step::Memory {
            on: value("mem=")? != 0,
        }),
        ["device-dma", iova, result @ ..] => Some(Step::Dma {
            iova: number(iova)?,
            faults: match result.last() {
                Some(&"fault") => Some(true),
                Some(&"ok") => Some(false),
                _ => None,
            },
        }),
        _ => None,
    }
}

/// `CASE SECOND actual free available`.
fn point(words: &[&str], series: bool) -> Option<Point> {
    let [case, second, actual, free, available] = words else {
        return None;
    };
    // Digits alone are a row of something else, unless a target stands before them.
    let named = case.starts_with(|c: char| c.is_alphabetic()) && case.len() <= 32 || series;
    let mib = |word: &str| word.parse::<u64>().ok();
    Some(Point {
        case: (*case).to_owned(),
        second: second
            .parse()
            .ok()
            .filter(|second: &f64| second.is_finite())?,
        actual: mib(actual)?,
        free: mib(free)?,
        available: mib(available)?,
    })
    .filter(|_| named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Facts {
        let mut facts = Facts::default();
        for (line_number, one) in (1..).zip(text.lines()) {
            assert!(line(&mut facts, 0, line_number, one), "{one}");
        }
        facts
    }

    #[test]
    fn members_of_groups_are_found_in_every_form() {
        let facts = read(
            "/sys/kernel/iommu_groups/1/devices/0000:00:01.0\n\
             IOMMU Group 1 01:00.0 VGA compatible controller [0300]: x [10de:1187]\n\
             1 0000:01:00.1 040300 10de:0e0a snd_hda_intel\n\
             1 0000:01:00.2 0c0330 10de:0e0b -",
        );
        let devices: Vec<_> = facts
            .members
            .iter()
            .map(|known| known.fact.device.as_str())
            .collect();
        assert_eq!(
            devices,
            [
                "0000:00:01.0",
                "0000:01:00.0",
                "0000:01:00.1",
                "0000:01:00.2"
            ]
        );
        assert_eq!(
            facts.known("0000:01:00.2", None).unwrap().fact.driver,
            Driver::None
        );
    }

    #[test]
    fn pools_regions_and_layouts_have_their_numbers() {
        let facts = read(
            "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages:16\n\
             0x00000000fee00000 0x00000000feefffff msi\n\
             0x0 0x7fffffffff\n\
             A bar 0000:01:00.0 0x1000 0x2000\n\
             00100000-ce2e3fff : System RAM\n\
             # target 2048 MiB\n\
             A 1 4096 100 200",
        );
        let pool = facts.pools[0].fact;
        assert_eq!(
            (pool.node, pool.page_bytes, pool.free),
            (Some(1), 2 << 20, 16)
        );
        assert_eq!(facts.reserved[0].fact.2, "msi");
        assert_eq!(facts.apertures[0].fact, (0, 0x7f_ffff_ffff));
        assert_eq!(facts.areas[0].fact.device.as_deref(), Some("0000:01:00.0"));
        assert_eq!(facts.targets[0].fact, (None, 2048));
        assert_eq!(facts.series[0].fact.free, 100);
        let facts = read("# target A 1024, B: 2048 MiB\n");
        let targets: Vec<_> = facts.targets.iter().map(|one| one.fact.clone()).collect();
        assert_eq!(
            targets,
            [(Some("A".into()), 1024), (Some("B".into()), 2048)]
        );
    }
}
