//! Which change would help most.

use serde::Serialize;

use super::{AreaKind, AreaReport, ProcessReport, Walk};

/// A change that would help.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// What is so, with numbers.
    pub finding: String,
    /// The setting that would change it.
    pub setting: String,
    /// Leaves of VT-d's second stage before and after, where it is about leaves.
    pub leaves: Option<(u64, u64)>,
}

/// The changes, the one that saves most leaves first.
pub(super) fn advice(report: &ProcessReport, areas: &[AreaReport], walk: &Walk) -> Vec<Advice> {
    let mut found = Vec::new();
    let now = report.costs.iter().find(|cost| cost.format == "vtd-ss");
    if let Some(now) = now.map(|cost| cost.leaf_count) {
        leaves(report, areas, walk, now, &mut found);
    }
    let needed = report.present_bytes;
    if let Some(limit) = report.limit.memlock_bytes
        && !report.limit.lifted
        && limit < needed
    {
        found.push(Advice {
            finding: format!(
                "its limit on locked memory is {}, and {} would be charged",
                runs::Bytes(limit),
                runs::Bytes(needed)
            ),
            setting: "LimitMEMLOCK=infinity (systemd), ulimit -l, or CAP_IPC_LOCK".into(),
            leaves: None,
        });
    }
    let used = report
        .nodes
        .iter()
        .filter(|(node, bytes)| node.is_some() && *bytes > 0);
    let used = used.count();
    if used > 1 {
        found.push(Advice {
            finding: format!("its memory is on {used} nodes: a device is near to one of them only"),
            setting: "numactl --membind, or host-nodes= and policy=bind of QEMU's memory backend"
                .into(),
            leaves: None,
        });
    }
    found.sort_by_key(|advice| {
        let saved = advice
            .leaves
            .map_or(0, |(before, after)| before.saturating_sub(after));
        std::cmp::Reverse(saved)
    });
    found
}

fn leaves(
    report: &ProcessReport,
    areas: &[AreaReport],
    walk: &Walk,
    now: u64,
    found: &mut Vec<Advice>,
) {
    let small: u64 = report
        .entries
        .iter()
        .filter(|entry| entry.page_bytes < 2 << 20)
        .map(|entry| entry.bytes)
        .sum();
    let share = |bytes: u64| (bytes as f64 / report.present_bytes.max(1) as f64 * 100.0).round();
    let [in_2m, in_1g] = walk.ideal.each_ref().map(super::Counter::leaf_count);
    if in_2m < now {
        let setting = match of_most_small(areas) {
            Some(AreaKind::Shared) => {
                "hugetlb=on for QEMU's memory-backend-memfd (memfd_create with MFD_HUGETLB), or \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled"
            }
            Some(AreaKind::File) => {
                "memory of its own, or a file of hugetlbfs, in place of the file"
            }
            _ => {
                "madvise(MADV_HUGEPAGE) before it is touched, or \
                 /sys/kernel/mm/transparent_hugepage/enabled"
            }
        };
        found.push(Advice {
            finding: format!(
                "{} % of the memory is in pages of less than 2 MiB: with pages of 2 MiB leaves fall \
                 from {} to {}",
                share(small),
                grouped(now),
                grouped(in_2m)
            ),
            setting: setting.into(),
            leaves: Some((now, in_2m)),
        });
    }
    // Where there are hardly more than some, nobody notices.
    if in_1g < in_2m.min(now) && in_2m.min(now) > 512 {
        found.push(Advice {
            finding: format!(
                "with pages of 1 GiB leaves fall from {} to {}",
                grouped(now),
                grouped(in_1g)
            ),
            setting:
                "hugepagesz=1G hugepages=N on the kernel's command line, and memory from that pool"
                    .into(),
            leaves: Some((now, in_1g)),
        });
    }
}

/// The kind of the areas with most small pages.
fn of_most_small(areas: &[AreaReport]) -> Option<AreaKind> {
    let small = |kind| {
        let of_kind = areas.iter().filter(|area| area.area.kind == kind);
        of_kind
            .map(|area| area.present_bytes - area.huge_bytes)
            .sum::<u64>()
    };
    [AreaKind::Anonymous, AreaKind::Shared, AreaKind::File]
        .into_iter()
        .max_by_key(|kind| small(*kind))
}

/// A number in groups of three digits.
fn grouped(number: u64) -> String {
    match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", grouped(number / 1000), number % 1000),
    }
}

#[cfg(test)]
mod tests {
    use iopt::FormatId;
    use runs::Run;

    use super::super::{Area, Counter, FormatCost, Limit};
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn area(kind: AreaKind, present_bytes: u64, huge_bytes: u64) -> AreaReport {
        AreaReport {
            area: Area {
                address: 0,
                bytes: present_bytes,
                kind,
                name: String::new(),
                page_bytes: 4096,
                locked_bytes: 0,
                asks_for_huge: false,
                refuses_huge: false,
                mappable: true,
            },
            present_bytes,
            huge_bytes,
            runs: None,
        }
    }

    fn findings(report: &ProcessReport) -> Vec<String> {
        let advice = advice(report, &[], &Walk::new());
        advice.into_iter().map(|advice| advice.finding).collect()
    }

    #[test]
    fn a_limit_below_what_is_present_is_advice_where_it_applies() {
        let limited = |limit, lifted| ProcessReport {
            present_bytes: GIB,
            limit: Limit {
                memlock_bytes: Some(limit),
                lifted,
            },
            ..ProcessReport::default()
        };
        let said = "its limit on locked memory is 8 MiB, and 1 GiB would be charged";
        assert_eq!(findings(&limited(8 * MIB, false)), [said]);
        assert!(findings(&limited(8 * MIB, true)).is_empty());
        assert!(findings(&limited(GIB, false)).is_empty());
    }

    #[test]
    fn memory_on_two_nodes_is_advice_and_what_is_unknown_is_no_node() {
        let on = |nodes: &[(Option<u32>, u64)]| ProcessReport {
            nodes: nodes.into(),
            ..ProcessReport::default()
        };
        let said = "its memory is on 2 nodes: a device is near to one of them only";
        let two = on(&[(Some(0), MIB), (Some(1), MIB), (Some(2), 0), (None, MIB)]);
        assert_eq!(findings(&two), [said]);
        assert!(findings(&on(&[(Some(0), MIB), (Some(2), 0), (None, MIB)])).is_empty());
    }

    #[test]
    fn larger_pages_are_advice_and_the_setting_is_that_of_the_small_ones() {
        let mut walk = Walk::new();
        for (counter, most) in walk.ideal.iter_mut().zip([2 * MIB, GIB]) {
            *counter = Counter::new(FormatId::VtdSs, 4, most).unwrap();
            counter.add(Run::new(GIB, GIB, 4 * GIB));
        }
        let report = ProcessReport {
            present_bytes: 4 * GIB,
            costs: vec![FormatCost {
                format: "vtd-ss".into(),
                leaf_count: 4 * GIB / 4096,
                ..FormatCost::default()
            }],
            ..ProcessReport::default()
        };
        // Most is shared, and in huge pages; what is small is its own.
        let areas = [
            area(AreaKind::Shared, 3 * GIB, 3 * GIB),
            area(AreaKind::Anonymous, GIB, 0),
        ];
        let found = advice(&report, &areas, &walk);
        let leaves: Vec<_> = found.iter().map(|advice| advice.leaves).collect();
        assert_eq!(leaves, [Some((1 << 20, 4)), Some((1 << 20, 2048))]);
        assert!(found[0].setting.contains("hugepagesz=1G"));
        assert!(found[1].setting.starts_with("madvise(MADV_HUGEPAGE)"));
        // The other way round.
        let areas = [
            area(AreaKind::Shared, 3 * GIB, 0),
            area(AreaKind::Anonymous, GIB, 0),
        ];
        let found = advice(&report, &areas, &walk);
        assert!(found[1].setting.starts_with("hugetlb=on"), "{found:?}");
    }

    #[test]
    fn numbers_are_grouped() {
        let numbers = [0, 999, 1000, 1_020_003].map(grouped);
        assert_eq!(numbers, ["0", "999", "1,000", "1,020,003"]);
    }
}
