//! Replays of traces: maps and unmaps of a client, and mappings of a BAR.
//!
//! Sources: vfio-user protocol (QEMU `docs/interop/vfio-user.rst`), VFIO_USER_DMA_MAP and VFIO_USER_DMA_UNMAP; Linux
//! `include/uapi/linux/vfio.h`, VFIO_DEVICE_FEATURE_DMA_BUF (6.19), `drivers/vfio/pci/vfio_pci_dmabuf.c`
//! (`vfio_pci_dma_buf_move`).

use super::super::facts::{Facts, Known, Step};
use super::super::finding::{Advice, Certainty, Evidence, Finding};

const PROTOCOL: &str = "QEMU docs/interop/vfio-user.rst, VFIO_USER_DMA_MAP, VFIO_USER_DMA_UNMAP";

/// A region that is mapped.
struct Region<'f> {
    first: u64,
    last: u64,
    evidence: &'f Evidence,
}

pub(super) fn findings(facts: &Facts, found: &mut Vec<Finding>) {
    let mut files: Vec<usize> = facts
        .steps
        .iter()
        .map(|one| one.evidence.place.file)
        .collect();
    files.dedup();
    for file in files {
        let steps: Vec<_> = facts
            .steps
            .iter()
            .filter(|one| one.evidence.place.file == file)
            .collect();
        regions(&steps, found);
        buffers(&steps, found);
    }
}

/// Maps and unmaps. A strict server refuses an unmap that is no region exactly, another one removes the regions
/// that lie in it; findings hold under both rules, or are likely.
fn regions(steps: &[&Known<Step>], found: &mut Vec<Finding>) {
    let mut mapped = Mapped::default();
    for step in steps {
        let last = |iova: u64, length: u64| iova.saturating_add(length - 1);
        match step.fact {
            Step::Map { iova, length } if length > 0 => {
                mapped.map(iova, last(iova, length), &step.evidence, found);
            }
            Step::Unmap { iova, length } if length > 0 => {
                mapped.unmap(iova, last(iova, length), &step.evidence, found);
            }
            _ => {}
        }
    }
}

/// Regions that are mapped under each rule.
#[derive(Default)]
struct Mapped<'f> {
    strict: Vec<Region<'f>>,
    windows: Vec<Region<'f>>,
}

impl<'f> Mapped<'f> {
    /// The most regions that are kept.
    const MOST: usize = 4096;

    fn map(&mut self, iova: u64, last: u64, evidence: &'f Evidence, found: &mut Vec<Finding>) {
        let overlaps = |one: &&Region<'_>| one.first <= last && iova <= one.last;
        let (a, b) = (
            self.strict.iter().find(overlaps),
            self.windows.iter().find(overlaps),
        );
        if let Some(other) = b.or(a) {
            let certainty = if a.is_some() && b.is_some() {
                Certainty::Certain
            } else {
                Certainty::Likely
            };
            found.push(
                Finding::new("trace.map-overlap", certainty, PROTOCOL)
                    .range(iova.max(other.first), last.min(other.last))
                    .evidence([evidence, other.evidence])
                    .say(format!(
                        "The map of {iova:#x} to {last:#x} overlaps the region {:#x} to {:#x}, which is mapped: \
                         it is to be refused (EEXIST).",
                        other.first, other.last
                    ))
                    .advise(Advice::text("The client must unmap the region before it maps over it.")),
            );
        }
        let (in_strict, in_windows) = (a.is_some(), b.is_some());
        for (list, taken) in [
            (&mut self.strict, in_strict),
            (&mut self.windows, in_windows),
        ] {
            if !taken && list.len() < Self::MOST {
                list.push(Region {
                    first: iova,
                    last,
                    evidence,
                });
            }
        }
    }

    fn unmap(&mut self, iova: u64, last: u64, evidence: &Evidence, found: &mut Vec<Finding>) {
        let exact = |one: &Region<'_>| (one.first, one.last) == (iova, last);
        let within = |one: &Region<'_>| one.first >= iova && one.last <= last;
        let touches = |one: &Region<'_>| one.first <= last && iova <= one.last;
        let in_strict = self.strict.iter().any(exact);
        if !in_strict {
            let covered = self.strict.iter().any(touches) || self.windows.iter().any(touches);
            let cause = match covered {
                true => "trace.unmap-mismatch",
                false => "trace.unmap-unknown",
            };
            let text = match covered {
                true => format!(
                    "The unmap of {iova:#x} to {last:#x} covers mapped regions and is none of them exactly: a \
                     strict server refuses it (ENOENT), one that takes windows removes the regions in it."
                ),
                false => format!(
                    "The unmap of {iova:#x} to {last:#x} names no region that is mapped (ENOENT)."
                ),
            };
            let others = self
                .strict
                .iter()
                .chain(&self.windows)
                .filter(|one| touches(one))
                .map(|one| one.evidence);
            found.push(
                Finding::certain(cause, PROTOCOL)
                    .range(iova, last)
                    .evidence([evidence])
                    .evidence(others.take(16))
                    .say(text)
                    .advise(Advice::text(
                        "The client must unmap regions as it has mapped them.",
                    )),
            );
        }
        if let Some(at) = self.strict.iter().position(exact) {
            self.strict.remove(at);
        }
        self.windows.retain(|one| !within(one));
    }
}

/// A mapping of a BAR by its buffer.
struct Buffer<'f> {
    first: u64,
    last: u64,
    /// It ended when memory decoding was switched off.
    revoked: Option<&'f Evidence>,
}

fn buffers(steps: &[&Known<Step>], found: &mut Vec<Finding>) {
    let mut buffers: Vec<Buffer<'_>> = Vec::new();
    let mut length = None;
    for step in steps {
        match &step.fact {
            Step::Export { .. } => {
                length =
                    super::super::number::number_after(&step.evidence.quote, "len=").or(length);
            }
            Step::MapFile { iova, length: own } => {
                let length = own.or(length).unwrap_or(1).max(1);
                // A new mapping takes the place of a revoked one.
                buffers.retain(|one| one.first != *iova);
                if buffers.len() < 4096 {
                    buffers.push(Buffer {
                        first: *iova,
                        last: iova.saturating_add(length - 1),
                        revoked: None,
                    });
                }
            }
            Step::Memory { on: false } => {
                for buffer in &mut buffers {
                    buffer.revoked.get_or_insert(&step.evidence);
                }
            }
            Step::Dma { iova, faults } => {
                let at = buffers
                    .iter()
                    .find(|one| (one.first..=one.last).contains(iova));
                let revoked = at.and_then(|one| one.revoked);
                if let Some(by) = revoked.filter(|_| *faults != Some(false)) {
                    found.push(
                        Finding::certain("trace.revoked-buffer", "Linux drivers/vfio/pci/vfio_pci_dmabuf.c, vfio_pci_dma_buf_move; include/uapi/linux/iommufd.h, IOMMU_IOAS_MAP_FILE")
                            .range(*iova, *iova)
                            .evidence([&step.evidence, by])
                            .say(format!(
                                "A device uses {iova:#x}, a mapping of a BAR that ended when memory decoding was switched \
                                 off; it does not come back with decoding."
                            ))
                            .advise(Advice::text(
                                "After memory decoding is on again: export the BAR again (VFIO_DEVICE_FEATURE_DMA_BUF) \
                                 and map it again (IOMMU_IOAS_MAP_FILE).",
                            )),
                    );
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{causes, of_text};

    #[test]
    fn maps_and_unmaps_are_replayed() {
        let found = of_text(
            "1 map 0x1000 0x1000 rw fd\n2 unmap 0x0 0x4000\n3 map 0x8000 0x2000 r -\n4 map 0x9000 0x1000 r -\n\
             5 unmap 0x8000 0x2000\n6 unmap 0x8000 0x2000\n",
        );
        assert_eq!(
            causes(&found),
            [
                "trace.unmap-mismatch",
                "trace.map-overlap",
                "trace.unmap-unknown"
            ]
        );
    }

    #[test]
    fn a_mapping_ends_with_memory_decoding_and_comes_back_by_a_map() {
        let text = "1 export-dmabuf bar=1 len=0x1000\n2 ioas-map-file iova=0x8000 -> ok\n3 config-write command mem=0\n\
            4 device-dma 0x8000 -> fault\n5 config-write command mem=1\n6 ioas-map-file iova=0x8000 -> ok\n7 device-dma 0x8000 -> ok\n";
        assert_eq!(causes(&of_text(text)), ["trace.revoked-buffer"]);
    }
}
