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
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        let numbers = [0, 999, 1000, 1_020_003].map(grouped);
        assert_eq!(numbers, ["0", "999", "1,000", "1,020,003"]);
    }
}
