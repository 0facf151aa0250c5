//! What reports look like to people; programs get them as JSON, as they are.

pub(crate) mod devices;
pub(crate) mod sheet;
pub(crate) mod svg;
pub(crate) mod text;

#[cfg(test)]
pub(crate) mod samples;

use dmaspace::map::MapReport;

use crate::size::{bytes, count, counted};

/// Whether the devices saw the memory as they had to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Right,
    /// What was wrong, one phrase each.
    Wrong(Vec<String>),
}

impl Verdict {
    /// Judges a report. A check that did not happen is not passed.
    pub(crate) fn of(report: &MapReport) -> Self {
        let (dma, size) = (&report.dma, report.memory.size_bytes);
        let mut wrong = Vec::new();
        if dma.wrong_bytes > 0 {
            wrong.push(match dma.wrong_bytes {
                1 => "1 byte was not what it had to be".into(),
                many => format!("{} bytes were not what they had to be", count(many)),
            });
        }
        if dma.faults > 0 {
            wrong.push(format!("{} inside the range", counted(dma.faults, "fault")));
        }
        let silent = dma.neighbour_accesses.saturating_sub(dma.neighbour_faults);
        if silent > 0 {
            let accesses = counted(silent, "access");
            wrong.push(format!("{accesses} outside the range did not fault"));
        }
        if dma.neighbour_accesses == 0 {
            wrong.push("nothing outside the range was tried".into());
        }
        for (checked, verb) in [(dma.read_bytes, "read"), (dma.written_bytes, "written")] {
            if checked < size {
                let (checked, size) = (bytes(checked), bytes(size));
                wrong.push(format!("only {checked} of {size} were {verb}"));
            }
        }
        if wrong.is_empty() {
            Self::Right
        } else {
            Self::Wrong(wrong)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(change: impl FnOnce(&mut MapReport)) -> Vec<String> {
        let mut report = samples::huge();
        change(&mut report);
        match Verdict::of(&report) {
            Verdict::Right => Vec::new(),
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
            wrong(|report| report.dma.faults = 1),
            ["1 fault inside the range"]
        );
        assert_eq!(
            wrong(|report| report.dma.neighbour_faults -= 2),
            ["2 accesses outside the range did not fault"]
        );
        assert_eq!(
            wrong(|report| {
                report.dma.neighbour_accesses = 0;
                report.dma.neighbour_faults = 0;
            }),
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
    fn the_names_in_json_are_stable() {
        let json = serde_json::to_value(samples::synthetic()).unwrap();
        let mut names = Vec::new();
        collect(&json, "", &mut names);
        assert_eq!(names.join("\n"), NAMES.trim());
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
.charge.charged_bytes
.charge.counter
.charge.limit_bytes
.charge.page_steps
.charge.pin
.charge.pin_buffers
.charge.pin_calls
.charge.pin_reason
.charge.steps
.dma.devices
.dma.faults
.dma.iotlb_hits
.dma.iotlb_misses
.dma.neighbour_accesses
.dma.neighbour_faults
.dma.read_bytes
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
.times.map_by_page_ns
.times.map_ns
.times.pin_ns
.times.populate_ns
.times.unmap_ns
.times.unpin_ns
";
}
