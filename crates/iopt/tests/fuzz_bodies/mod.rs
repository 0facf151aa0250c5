//! What the fuzz targets do with bytes: `fuzz/` calls these functions with whatever it comes upon,
//! `tests/corpus.rs` with what it came upon before.
//!
//! Each takes any bytes, and panics when something does not hold.

mod decode;
mod formats;
mod readers;
mod walk;

/// One target.
pub type Target = (&'static str, fn(&[u8]));

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 11] = [
    ("decode_amdv1", decode::amdv1),
    ("decode_x86_64", decode::x86_64),
    ("decode_vtd_ss", decode::vtd_ss),
    ("decode_arm_stage1", decode::arm_stage1),
    ("decode_arm_stage2", decode::arm_stage2),
    ("decode_armv7s", decode::armv7s),
    ("decode_riscv", decode::riscv),
    ("decode_riscv_g", decode::riscv_g),
    ("decode_dart", decode::dart),
    ("readers", readers::readers),
    ("walk", walk::walk),
];

/// Runs the target of this name.
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|(target, _)| *target == name);
    let (_, body) = target.unwrap_or_else(|| panic!("there is no target {name}"));
    body(data);
}

/// The input, taken piece by piece; zeros when it is used up.
pub struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut piece = [0; N];
        let (now, rest) = self.0.split_at(N.min(self.0.len()));
        piece[..now.len()].copy_from_slice(now);
        self.0 = rest;
        piece
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        usize::from(self.u8()) % end
    }
}
