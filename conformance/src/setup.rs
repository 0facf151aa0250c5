//! Sides of a comparison: a table of Linux and the same table of ours.

use std::sync::atomic::AtomicU32;

use anyhow::Context as _;
use iopt::format::{
    Above, AmdV1, ArmOptions, ArmStage1, ArmStage2, ArmV7s, Dart1, Dart1Page4K, Dart2, Granule, K4,
    K16, K64, K64Lpa, RiscV, VtdSs, X86_64,
};
use iopt::{BuildError, Format, HeapArena, Prot, TableMemory, WideCell};
use runs::{Iova, Span};

use crate::compare::Words;
use crate::drive::{self, Amount, Outcome};
use crate::server::{LinuxConfig, LinuxFormat, Server, option};

/// Permissions as Linux's core says them (`IOMMU_…` of `linux-pt/shim.h`).
pub mod flag {
    /// The device may read.
    pub const READ: u32 = 1 << 0;
    /// The device may write.
    pub const WRITE: u32 = 1 << 1;
    /// Accesses are coherent with the processor's caches.
    pub const CACHE: u32 = 1 << 2;
    /// The device may not fetch instructions.
    pub const NOEXEC: u32 = 1 << 3;
    /// A device's registers.
    pub const MMIO: u32 = 1 << 4;
    /// For privileged requests only.
    pub const PRIV: u32 = 1 << 5;
    /// All combinations lie below.
    pub const END: u32 = 1 << 6;
}

type Drive = Box<dyn Fn(&Setup, &mut Server, &Amount) -> anyhow::Result<Outcome> + Send + Sync>;

/// One table on both sides.
pub struct Setup {
    /// Its name.
    pub name: String,
    /// Linux's side.
    pub linux: LinuxConfig,
    drive: Drive,
}

impl Setup {
    /// Drives both sides.
    pub fn drive(&self, server: &mut Server, amount: &Amount) -> anyhow::Result<Outcome> {
        (self.drive)(self, server, amount)
    }

    /// Meaning of a request of Linux's in our words.
    pub fn prot(&self, flags: u32) -> Prot {
        let has = |bits| flags & bits != 0;
        let mut prot = Prot::empty();
        prot.set(Prot::READ, has(flag::READ));
        prot.set(Prot::WRITE, has(flag::WRITE));
        prot.set(Prot::EXECUTE, !has(flag::NOEXEC));
        prot.set(Prot::PRIVILEGED, has(flag::PRIV));
        prot.set(Prot::DEVICE, has(flag::MMIO));
        let memory = !has(flag::MMIO);
        match self.linux.format {
            // Snooping of accesses is one choice for the whole table.
            LinuxFormat::AmdV1 | LinuxFormat::AmdV1Growing | LinuxFormat::VtdSs => {
                prot.set(Prot::COHERENT, self.linux.has(option::FORCE_COHERENT));
            }
            // The memory's own attributes count, and IOMMU_CACHE means nothing.
            LinuxFormat::X86_64 | LinuxFormat::Dart1 => {}
            LinuxFormat::RiscV if !self.linux.has(option::SVPBMT) => {}
            LinuxFormat::Dart2 => prot.set(Prot::COHERENT, has(flag::CACHE)),
            _ => prot.set(Prot::UNCACHED, memory && !has(flag::CACHE)),
        }
        if self.linux.has(option::FORCED_WRITE_BACK) {
            prot.set(Prot::COHERENT, memory && has(flag::CACHE));
        }
        prot
    }
}

/// Table memory of ours, on the heap.
pub trait Heap: TableMemory + Words + Sized + Sync {
    /// Room for so many tables, at addresses of no more than `bits` bits.
    fn room_for(tables: u64, bits: u32) -> anyhow::Result<Self>;
}

macro_rules! heaps {
    ($($cell:ty, $log2:literal;)*) => {$(
        impl Words for HeapArena<$cell, $log2> {
            fn word(&self, address: u64) -> Option<u64> {
                self.read(address)
            }
        }
        impl Heap for HeapArena<$cell, $log2> {
            fn room_for(tables: u64, bits: u32) -> anyhow::Result<Self> {
                let base = 1 << (bits - 1).min(46);
                Self::with_tables_at(tables, base).context("table memory")
            }
        }
    )*};
}
heaps! {
    WideCell, 12;
    WideCell, 14;
    WideCell, 16;
    AtomicU32, 10;
}

/// Tables of 4, 16 and 64 KiB, and of 1 KiB with narrow entries.
type Heap4K = HeapArena<WideCell, 12>;
type Heap16K = HeapArena<WideCell, 14>;
type Heap64K = HeapArena<WideCell, 16>;
type Heap1K = HeapArena<AtomicU32, 10>;

/// A setup of tables `F` in memory `A`.
pub fn setup<F: Format, A: Heap + 'static>(
    name: impl Into<String>,
    linux: LinuxConfig,
    format: Result<F, BuildError>,
) -> anyhow::Result<Setup> {
    let name = name.into();
    let format = format.with_context(|| name.clone())?;
    let drive = move |setup: &Setup, server: &mut Server, amount: &Amount| {
        drive::drive::<F, A>(setup, format, server, amount)
    };
    Ok(Setup {
        name,
        linux,
        drive: Box::new(drive),
    })
}

pub(crate) const fn generic(
    format: LinuxFormat,
    levels: u8,
    bits: u32,
    out: u32,
    options: u64,
) -> LinuxConfig {
    LinuxConfig {
        format,
        options,
        input_bits: bits,
        output_bits: out,
        levels,
        page_sizes: 0,
    }
}

pub(crate) const fn sized(
    format: LinuxFormat,
    bits: u32,
    out: u32,
    sizes: u64,
    options: u64,
) -> LinuxConfig {
    LinuxConfig {
        format,
        options,
        input_bits: bits,
        output_bits: out,
        levels: 0,
        page_sizes: sizes,
    }
}

/// Everything that is compared.
pub fn all() -> anyhow::Result<Vec<Setup>> {
    let mut setups = Vec::new();
    pc(&mut setups)?;
    riscv(&mut setups)?;
    arm::<K4, Heap4K>(
        &mut setups,
        "4k",
        &[(32, 32), (36, 36), (39, 40), (42, 44), (48, 48)],
    )?;
    arm::<K16, Heap16K>(
        &mut setups,
        "16k",
        &[(32, 32), (36, 36), (40, 42), (47, 44), (48, 48)],
    )?;
    arm::<K64, Heap64K>(&mut setups, "64k", &[(32, 32), (42, 40), (48, 48)])?;
    arm::<K64Lpa, Heap64K>(&mut setups, "64k-lpa", &[(48, 52), (52, 52)])?;
    arm_stage2(&mut setups)?;
    rest(&mut setups)?;
    Ok(setups)
}

/// AMD v1, x86-64, VT-d second stage.
fn pc(setups: &mut Vec<Setup>) -> anyhow::Result<()> {
    use LinuxFormat::{AmdV1 as Amd, AmdV1Growing, VtdSs as Vtd, X86_64 as X86};
    let (coherent, sign) = (option::FORCE_COHERENT, option::SIGN_EXTENDED);
    let dirty_caches = option::INCOHERENT;
    for (levels, bits, options) in [
        (2, 30, 0),
        (3, 39, coherent),
        (4, 48, 0),
        (5, 57, 0),
        (6, 64, 0),
    ] {
        let linux = generic(Amd, levels, bits, 52, options);
        let name = format!(
            "amdv1, {levels} levels{}",
            if options == 0 { "" } else { ", coherent" }
        );
        setups.push(setup::<_, Heap4K>(name, linux, AmdV1::new(levels))?);
    }
    let linux = generic(AmdV1Growing, 3, 64, 52, coherent);
    setups.push(setup::<_, Heap4K>("amdv1, growing", linux, AmdV1::new(6))?);
    for (name, levels, bits, options) in [
        ("x86-64, 4 levels", 4, 48, sign),
        ("x86-64, 5 levels, incoherent", 5, 57, sign | dirty_caches),
        ("x86-64, 4 levels, lower half", 4, 47, 0),
    ] {
        let linux = generic(X86, levels, bits, 52, options);
        setups.push(setup::<_, Heap4K>(name, linux, X86_64::new(levels))?);
    }
    for (name, levels, bits, options) in [
        ("vtd-ss, 3 levels", 3, 39, 0),
        ("vtd-ss, 4 levels, coherent", 4, 48, coherent),
        ("vtd-ss, 5 levels, incoherent", 5, 57, dirty_caches),
    ] {
        let linux = generic(Vtd, levels, bits, 52, options);
        setups.push(setup::<_, Heap4K>(name, linux, VtdSs::new(levels))?);
    }
    Ok(())
}

fn riscv(setups: &mut Vec<Setup>) -> anyhow::Result<()> {
    let sign = option::SIGN_EXTENDED;
    for (name, levels, bits, options) in [
        ("riscv, sv39", 3, 39, option::SVNAPOT),
        ("riscv, sv48, without svnapot", 4, 48, 0),
        (
            "riscv, sv57, svpbmt",
            5,
            57,
            option::SVNAPOT | option::SVPBMT,
        ),
    ] {
        let linux = generic(LinuxFormat::RiscV, levels, bits, 56, sign | options);
        let typed = options & option::SVPBMT != 0;
        let format = RiscV::new(levels).map(|format| {
            let format = format.with_memory_types(typed);
            format.with_supervisor_requests(true)
        });
        setups.push(setup::<_, Heap4K>(name, linux, format)?);
    }
    Ok(())
}

/// The sizes of pages that Linux is offered with granule `G`: the granule says which it uses.
pub(crate) const fn arm_sizes<G: Granule>(out: u32) -> u64 {
    match G::LOG2 {
        12 => 1 << 12 | 1 << 21 | 1 << 30,
        14 => 1 << 14 | 1 << 25,
        _ if out > 48 => 1 << 16 | 1 << 29 | 1 << 42,
        _ => 1 << 16 | 1 << 29,
    }
}

const DIRTY: ArmOptions = ArmOptions {
    dirty: true,
    ..ArmOptions::PLAIN
};

/// Stage 1 with granule `G`. The attribute indices are those that Linux writes to MAIR.
fn arm<G: Granule, A: Heap + 'static>(
    setups: &mut Vec<Setup>,
    name: &str,
    bits: &[(u32, u32)],
) -> anyhow::Result<()> {
    for &(input, out) in bits {
        for (suffix, options) in [
            ("", 0),
            (", upper, dirty", option::UPPER | option::DIRTY),
            (", incoherent", option::INCOHERENT),
        ] {
            // Once, with the most bits.
            if options != 0 && Some(&(input, out)) != bits.last() {
                continue;
            }
            let linux = sized(
                LinuxFormat::ArmStage1,
                input,
                out,
                arm_sizes::<G>(out),
                options,
            );
            let format = ArmStage1::<G>::new(input, out)
                .and_then(|format| format.with_attribute_indices(1, 2, 0))
                .map(|format| match options & option::UPPER {
                    0 => format,
                    _ => format.upper().with_options(DIRTY),
                });
            let name = format!("arm-s1-{name}, {input} to {out} bits{suffix}");
            setups.push(setup::<_, A>(name, linux, format)?);
        }
    }
    Ok(())
}

/// Stage 2: as many levels as Linux takes. It puts tables side by side only where it must.
fn arm_stage2(setups: &mut Vec<Setup>) -> anyhow::Result<()> {
    let (fwb, incoherent) = (option::FORCED_WRITE_BACK, option::INCOHERENT);
    for (input, out, levels, options) in [
        (32, 32, 3, 0),
        (39, 48, 3, fwb),
        // Two and eight tables side by side.
        (40, 40, 3, 0),
        (42, 42, 3, 0),
        (44, 44, 4, incoherent),
        (48, 48, 4, fwb),
    ] {
        stage2::<K4, Heap4K>(setups, "4k", (input, out), levels, options)?;
    }
    for (input, out, levels, options) in [
        (36, 36, 2, 0),
        // Sixteen and two tables side by side.
        (40, 40, 2, fwb),
        (42, 44, 3, incoherent),
        (48, 48, 3, 0),
    ] {
        stage2::<K16, Heap16K>(setups, "16k", (input, out), levels, options)?;
    }
    stage2::<K64, Heap64K>(setups, "64k", (40, 40), 2, 0)?;
    stage2::<K64, Heap64K>(setups, "64k", (48, 48), 3, fwb)?;
    stage2::<K64Lpa, Heap64K>(setups, "64k-lpa", (52, 52), 3, 0)
}

fn stage2<G: Granule, A: Heap + 'static>(
    setups: &mut Vec<Setup>,
    name: &str,
    (input, out): (u32, u32),
    levels: u8,
    options: u64,
) -> anyhow::Result<()> {
    let linux = sized(
        LinuxFormat::ArmStage2,
        input,
        out,
        arm_sizes::<G>(out),
        options,
    );
    let format = ArmStage2::<G>::new(input, out)
        .and_then(|format| format.with_levels(levels))
        .map(|format| match options & option::FORCED_WRITE_BACK {
            0 => format,
            _ => format.with_forced_write_back(),
        });
    let suffix = match options {
        option::FORCED_WRITE_BACK => ", forced write-back",
        option::INCOHERENT => ", incoherent",
        _ => "",
    };
    let name = format!("arm-s2-{name}, {input} to {out} bits{suffix}");
    setups.push(setup::<_, A>(name, linux, format)?);
    Ok(())
}

/// ARMv7 short descriptors, and DART.
fn rest(setups: &mut Vec<Setup>) -> anyhow::Result<()> {
    let short = 1 << 12 | 1 << 16 | 1 << 20;
    for (name, sizes) in [
        ("armv7-short", short | 1 << 24),
        ("armv7-short, without supersections", short),
    ] {
        let linux = sized(LinuxFormat::ArmV7s, 32, 32, sizes, 0);
        setups.push(setup::<_, Heap1K>(name, linux, Ok(<ArmV7s>::new()))?);
    }
    for (input, levels) in [(32, 2), (36, 2)] {
        let linux = sized(LinuxFormat::Dart1, input, 36, 1 << 14, 0);
        let format = Dart1::new(levels, input as u8);
        setups.push(setup::<_, Heap16K>(
            format!("dart1, {input} bits"),
            linux,
            format,
        )?);
    }
    let linux = sized(LinuxFormat::Dart1, 32, 36, 1 << 12, 0);
    setups.push(setup::<_, Heap4K>(
        "dart1, 4k, four roots",
        linux,
        Dart1Page4K::new(2, 32),
    )?);
    for (input, levels) in [(32, 2), (36, 2), (42, 3)] {
        let linux = sized(LinuxFormat::Dart2, input, 42, 1 << 14, 0);
        let format = Dart2::new(levels, input as u8);
        setups.push(setup::<_, Heap16K>(
            format!("dart2, {input} bits"),
            linux,
            format,
        )?);
    }
    Ok(())
}

/// The input addresses that both sides translate.
pub fn spans<F: Format>(format: &F, linux: &LinuxConfig) -> Vec<Span<Iova>> {
    let aperture = format.aperture();
    if aperture.above == Above::Sign && linux.input_bits < aperture.bits {
        return vec![Span::new(0, 1 << linux.input_bits)];
    }
    aperture.spans().collect()
}
