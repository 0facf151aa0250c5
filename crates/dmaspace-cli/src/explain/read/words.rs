//! Words of a line that decide which readers see it.

use std::sync::LazyLock;

use aho_corasick::automaton::{Automaton as _, StateID};
use aho_corasick::dfa::DFA;
use aho_corasick::{Anchored, StartKind};

/// Lines after one of a unit that are read as its continuation.
pub(super) const NEAR: u32 = 32;

pub(super) const UNIT: u8 = 1;

pub(super) const MONITOR: u8 = 2;

pub(super) const CONFIGURATION: u8 = 4;

pub(super) const INTEL: u8 = 8;

pub(super) const AMD: u8 = 16;

/// A line of VFIO or iommufd that may tell of a failure.
pub(super) const VFIO: u8 = 32;

/// Words that decide which readers see a line.
const WORDS: [(&str, u8); 88] = [
    ("DMAR", UNIT | INTEL),
    ("AMD-Vi", UNIT | AMD),
    ("dmar", UNIT),
    ("iommu", UNIT),
    ("IOMMU", UNIT),
    ("smmu", UNIT),
    ("SMMU", UNIT),
    ("dart", UNIT),
    ("DART", UNIT),
    ("pamu", UNIT),
    ("PAMU", UNIT),
    ("ipmmu", UNIT),
    ("mc-err", UNIT),
    ("-mc ", UNIT),
    ("memory-controller", UNIT),
    ("mmu_fault", UNIT),
    ("callbacks suppressed", UNIT),
    ("messages suppressed", UNIT),
    ("page fault", UNIT),
    ("Page fault", UNIT),
    ("PAGE FAULT", UNIT),
    ("context fault", UNIT),
    ("translation fault", UNIT),
    ("PTE ", UNIT),
    ("fault reason", UNIT),
    ("fault addr", UNIT),
    ("sysmmu", UNIT),
    ("gpu fault", UNIT),
    ("qcom-tbu", UNIT),
    ("VINTF", UNIT),
    ("vintf", UNIT),
    ("VCMDQ", UNIT),
    ("INTR-REMAP", UNIT),
    ("MEMLOCK", MONITOR),
    ("ocked memory", MONITOR),
    ("MAP_DMA", MONITOR),
    ("map_dma", MONITOR),
    ("MapDma", MONITOR),
    ("dma_map", MONITOR),
    ("DmaMap", MONITOR),
    ("DMA map", MONITOR),
    ("dma map", MONITOR),
    ("map DMA", MONITOR),
    ("mapping DMA", MONITOR),
    ("IOAS", MONITOR),
    ("ioas", MONITOR),
    ("Ioas", MONITOR),
    ("memlock rlimits", MONITOR),
    ("ulimit memlock", MONITOR),
    ("ulimit=memlock", MONITOR),
    ("guest memory map", MONITOR),
    ("not viable", MONITOR),
    ("inviable", MONITOR),
    ("GroupViable", MONITOR),
    ("ineligible", MONITOR),
    ("have a 1:1", MONITOR),
    ("IOVA region", MONITOR),
    ("not sufficient", MONITOR),
    ("RMPUPDATE", MONITOR),
    ("rmpupdate", MONITOR),
    ("PFN: 0x", MONITOR),
    ("all ones", MONITOR),
    ("cap 0 ecap 0", MONITOR),
    ("RMRR", MONITOR),
    ("IVRS", MONITOR),
    ("IOAPIC", MONITOR),
    ("checksum", MONITOR),
    ("reported at address", MONITOR),
    ("zero-length", MONITOR),
    ("Invalid DMAR", MONITOR),
    ("boot mappings", MONITOR),
    ("iova-to-phys", MONITOR),
    ("guest RAM", MONITOR),
    ("nsufficient hugepages", MONITOR),
    ("host memory pages", MONITOR),
    ("preallocating", MONITOR),
    ("Linux ", MONITOR),
    ("QEMU emulator", MONITOR),
    ("QEMU version", MONITOR),
    ("qemu version", MONITOR),
    ("ommand line: ", CONFIGURATION),
    ("qemu-system", CONFIGURATION),
    ("qemu-kvm", CONFIGURATION),
    ("kvm ", CONFIGURATION),
    ("<domain", CONFIGURATION),
    ("vfio", VFIO),
    ("VFIO", VFIO),
    ("Vfio", VFIO),
];

/// The automaton of [`WORDS`]; without it every reader sees every line.
static ANCHORS: LazyLock<Option<(DFA, StateID)>> = LazyLock::new(|| {
    let mut builder = DFA::builder();
    builder.prefilter(false).start_kind(StartKind::Unanchored);
    let automaton = builder.build(WORDS.iter().map(|(word, _)| *word)).ok()?;
    let start = automaton.start_state(Anchored::No).ok()?;
    Some((automaton, start))
});

/// The readers that the words of a line ask for.
pub(super) fn interest(text: &str) -> u8 {
    let Some((automaton, start)) = ANCHORS.as_ref() else {
        return UNIT | MONITOR | CONFIGURATION | VFIO;
    };
    let mut state = *start;
    let mut interest = 0;
    for byte in text.bytes() {
        state = automaton.next_state(Anchored::No, state, byte);
        if automaton.is_special(state) && automaton.is_match(state) {
            for index in 0..automaton.match_len(state) {
                let word = WORDS.get(automaton.match_pattern(state, index).as_usize());
                interest |= word.map_or(0, |(_, kind)| *kind);
            }
        }
    }
    interest
}

/// A filter of a log: lines that a reader asks for, and those behind a line of a unit that go on with its numbers.
#[derive(Debug, Default)]
pub(in crate::explain) struct Concerned {
    near: u32,
}

impl Concerned {
    /// True for a line that some reader may take.
    pub(in crate::explain) fn takes(&mut self, line: &str) -> bool {
        let interest = interest(line);
        self.near = match interest & UNIT {
            0 => self.near.saturating_sub(1),
            _ => NEAR,
        };
        interest != 0 || self.near > 0 && line.contains("0x")
    }
}
