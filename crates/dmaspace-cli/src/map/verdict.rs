//! Whether a map was right.

use super::MapReport;

use crate::size::{bytes, count, counted};

/// Whether the devices saw the memory as they had to, and everything was given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Right,
    /// Nothing is known to be wrong, but no byte was checked: why.
    Unchecked(String),
    /// What was wrong, one phrase each.
    Wrong(Vec<String>),
}

impl Verdict {
    /// Judges a report. A check that did not happen is not passed.
    pub(crate) fn of(report: &MapReport) -> Self {
        let mut wrong = Vec::new();
        if report.dma.not_checked.is_none() {
            dma(report, &mut wrong);
        }
        if report.backend.device.is_some() {
            left(report, &mut wrong);
        }
        match &report.dma.not_checked {
            _ if !wrong.is_empty() => Self::Wrong(wrong),
            Some(why) => Self::Unchecked(why.clone()),
            None => Self::Right,
        }
    }
}

/// What devices found wrong.
fn dma(report: &MapReport, wrong: &mut Vec<String>) {
    let (dma, size) = (&report.dma, report.memory.size_bytes);
    if dma.wrong_bytes > 0 {
        wrong.push(match dma.wrong_bytes {
            1 => "1 byte was not what it had to be".into(),
            many => format!("{} bytes were not what they had to be", count(many)),
        });
    }
    let faults = dma.unit.as_ref().map_or(0, |unit| unit.faults);
    if faults > 0 {
        wrong.push(format!("{} inside the range", counted(faults, "fault")));
    }
    if dma.neighbour_reached > 0 {
        let accesses = counted(dma.neighbour_reached, "access");
        wrong.push(format!("{accesses} outside the range got through"));
    }
    if dma.neighbour_accesses == 0 {
        wrong.push("nothing outside the range was tried".into());
    }
    let parts = match &dma.sample {
        // Samples are read and written; what is in between is compared.
        Some(sample) => [
            (dma.read_bytes, 1, "read"),
            (dma.written_bytes, 1, "written"),
            (sample.compared_bytes, size, "compared"),
        ],
        None => [
            (dma.read_bytes, size, "read"),
            (dma.written_bytes, size, "written"),
            (size, size, "compared"),
        ],
    };
    for (done, least, verb) in parts {
        if done < least {
            let (done, size) = (bytes(done), bytes(size));
            wrong.push(format!("only {done} of {size} were {verb}"));
        }
    }
}

/// What the kernel has not given back.
fn left(report: &MapReport, wrong: &mut Vec<String>) {
    let charge = &report.charge;
    let left = charge.after.since(charge.before);
    for (bytes_left, what) in [(left.locked_bytes, "locked"), (left.pinned_bytes, "pinned")] {
        if bytes_left > 0 {
            let left = bytes(bytes_left);
            wrong.push(format!(
                "{left} are still counted as {what} after the unmap"
            ));
        }
    }
    let mappings = report.backend.mappings.unwrap_or_default().left;
    if mappings > 0 {
        wrong.push(format!(
            "{} left after the unmap",
            counted(mappings, "mapping")
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn wrong(change: impl FnOnce(&mut MapReport)) -> Vec<String> {
        let mut report = samples::huge();
        change(&mut report);
        phrases(&report)
    }

    fn phrases(report: &MapReport) -> Vec<String> {
        match Verdict::of(report) {
            Verdict::Right => Vec::new(),
            Verdict::Unchecked(why) => vec![format!("unchecked: {why}")],
            Verdict::Wrong(wrong) => wrong,
        }
    }

    #[test]
    fn each_kind_of_failure_is_named() {
        assert_eq!(wrong(|_| ()), [""; 0]);
        assert_eq!(
            wrong(|report| report.dma.wrong_bytes = 4096),
            ["4,096 bytes were not what they had to be"]
        );
        assert_eq!(
            wrong(|report| report.dma.unit.as_mut().unwrap().faults = 1),
            ["1 fault inside the range"]
        );
        assert_eq!(
            wrong(|report| report.dma.neighbour_reached = 2),
            ["2 accesses outside the range got through"]
        );
        assert_eq!(
            wrong(|report| report.dma.neighbour_accesses = 0),
            ["nothing outside the range was tried"]
        );
        assert_eq!(
            wrong(|report| report.dma.read_bytes = 0),
            ["only 0 B of 256 MiB were read"]
        );
        assert_eq!(
            wrong(|report| report.dma.written_bytes = 4096),
            ["only 4 KiB of 256 MiB were written"]
        );
    }

    #[test]
    fn each_kind_of_failure_of_a_real_device_is_named() {
        type Change = fn(&mut MapReport);
        let cases: [(Change, &str); 7] = [
            (|_| (), ""),
            (
                |report| report.dma.wrong_bytes = 1,
                "1 byte was not what it had to be",
            ),
            (
                |report| report.dma.neighbour_reached = 1,
                "1 access outside the range got through",
            ),
            (
                |report| report.dma.read_bytes = 0,
                "only 0 B of 256 MiB were read",
            ),
            (
                |report| report.dma.sample.as_mut().unwrap().compared_bytes = samples::M,
                "only 1 MiB of 256 MiB were compared",
            ),
            (
                |report| report.charge.after.locked_bytes += 4096,
                "4 KiB are still counted as locked after the unmap",
            ),
            (
                |report| report.backend.mappings.as_mut().unwrap().left = 2,
                "2 mappings left after the unmap",
            ),
        ];
        for (change, expected) in cases {
            let mut report = samples::sampled();
            change(&mut report);
            assert_eq!(phrases(&report).join("; "), expected);
        }
    }

    /// Without a check there is no wrong byte, but what is left is wrong all the same.
    #[test]
    fn what_was_not_checked_is_neither_right_nor_wrong() {
        let mut report = samples::unchecked();
        assert_eq!(
            phrases(&report),
            ["unchecked: no driver for 8086:1234 here"]
        );
        report.charge.after.pinned_bytes += 4096;
        assert_eq!(
            phrases(&report),
            ["4 KiB are still counted as pinned after the unmap"]
        );
    }

    #[test]
    fn the_names_in_json_are_stable() {
        for (report, expected) in [
            (samples::synthetic(), NAMES),
            (samples::sampled(), NAMES_OF_THE_KERNEL),
        ] {
            let json = serde_json::to_value(report).unwrap();
            let mut names = Vec::new();
            collect(&json, "", &mut names);
            assert_eq!(names.join("\n"), expected.trim());
        }
    }

    fn collect(value: &serde_json::Value, path: &str, names: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(fields) => {
                for (name, value) in fields {
                    collect(value, &format!("{path}.{name}"), names);
                }
            }
            serde_json::Value::Array(items) => {
                if let Some(first) = items.first() {
                    collect(first, &format!("{path}[]"), names);
                }
            }
            _ => names.push(path.into()),
        }
    }

    const NAMES: &str = "
.backend.device
.backend.granule_bytes
.backend.mappings
.backend.name
.backend.page_sizes_bytes[]
.backend.windows[].first
.backend.windows[].last
.charge.after.locked_bytes
.charge.after.pinned_bytes
.charge.before.locked_bytes
.charge.before.pinned_bytes
.charge.charged_bytes
.charge.counter
.charge.limit_bytes
.charge.mapped.locked_bytes
.charge.mapped.pinned_bytes
.charge.page_steps
.charge.pin
.charge.pin_buffers
.charge.pin_calls
.charge.pin_reason
.charge.steps
.compared.by_page_ns.lower
.compared.by_page_ns.median
.compared.by_page_ns.upper
.compared.by_runs_ns.lower
.compared.by_runs_ns.median
.compared.by_runs_ns.upper
.compared.ratio.lower
.compared.ratio.median
.compared.ratio.upper
.compared.rounds
.dma.devices
.dma.faults
.dma.iotlb_hits
.dma.iotlb_misses
.dma.neighbour_accesses
.dma.neighbour_faults
.dma.neighbour_reached
.dma.not_checked
.dma.read_bytes
.dma.sample
.dma.table_reads
.dma.written_bytes
.dma.wrong_bytes
.layout[].iova
.layout[].leaf_bytes
.layout[].len_bytes
.memory.addresses
.memory.addresses_reason
.memory.backing
.memory.backing_reason
.memory.huge_bytes
.memory.looks
.memory.nodes[].bytes
.memory.nodes[].node
.memory.pool_pages_added
.memory.run_sizes[].bytes
.memory.run_sizes[].count
.memory.run_sizes[].from_bytes
.memory.runs
.memory.size_bytes
.memory.size_reason
.placement
.tables.format
.tables.leaves[].bytes
.tables.leaves[].count
.tables.leaves[].from_bytes
.tables.levels
.tables.nodes[].bytes
.tables.nodes[].node
.tables.table_bytes
.tables.table_pages
.times.attach_ns
.times.dma_check_ns
.times.find_runs_ns
.times.map_ns
.times.pin_ns
.times.populate_ns
.times.unmap_ns
.times.unpin_ns
";

    const NAMES_OF_THE_KERNEL: &str = "
.backend.device.address
.backend.device.cdev
.backend.device.group
.backend.device.id
.backend.device.node
.backend.device.unit
.backend.granule_bytes
.backend.lacks[].cannot
.backend.lacks[].name
.backend.mappings.available
.backend.mappings.left
.backend.mappings.made
.backend.name
.backend.page_sizes_bytes[]
.backend.windows[].first
.backend.windows[].last
.charge.after.locked_bytes
.charge.after.pinned_bytes
.charge.before.locked_bytes
.charge.before.pinned_bytes
.charge.charged_bytes
.charge.counter
.charge.limit_bytes
.charge.mapped.locked_bytes
.charge.mapped.pinned_bytes
.charge.page_steps
.charge.steps
.compared
.dma.devices
.dma.neighbour_accesses
.dma.neighbour_reached
.dma.not_checked
.dma.read_bytes
.dma.sample.compared_bytes
.dma.sample.copies
.dma.sample.engine
.dma.written_bytes
.dma.wrong_bytes
.layout
.memory.backing
.memory.backing_reason
.memory.huge_bytes
.memory.nodes[].bytes
.memory.nodes[].node
.memory.pool_pages_added
.memory.size_bytes
.memory.size_reason
.placement
.tables
.times.attach_ns
.times.dma_check_ns
.times.find_runs_ns
.times.map_ns
.times.pin_ns
.times.populate_ns
.times.unmap_ns
.times.unpin_ns
";
}
