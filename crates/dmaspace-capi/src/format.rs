//! Formats by name, and what a table of one is configured to.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::LazyLock;

use dmaspace::iopt::format::{ArmV7s, Dart1, Dart2, DartVersion};
use dmaspace::iopt::geometry::Geometry;
use dmaspace::iopt::named::{FORMATS, root};
use dmaspace::iopt::{Format, FormatId};
use dmaspace::runs::PageSizes;

use crate::boundary::text;
use crate::status::{Failure, Result, Status};

static NAMES: LazyLock<Vec<CString>> = LazyLock::new(|| {
    let names = FORMATS.into_iter();
    names.filter_map(|name| CString::new(name).ok()).collect()
});

/// How many formats there are.
#[unsafe(no_mangle)]
pub extern "C" fn dmaspace_format_count() -> usize {
    FORMATS.len()
}

/// The name of a format, like "vtd-ss"; NULL when there are not so many. It is this library's, and stays.
#[unsafe(no_mangle)]
pub extern "C" fn dmaspace_format_name(index: usize) -> *const c_char {
    NAMES.get(index).map_or(ptr::null(), |name| name.as_ptr())
}

/// Which table is to be built. All zero but for `format` is a good choice.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TableConfig {
    /// The format's name: see `dmaspace_format_name`.
    pub format: *const c_char,
    /// The size of the largest leaf, in bytes, where the table need not have all that the format has; 0
    /// for all.
    pub max_leaf: u64,
    /// The number of levels. 0: 4 for Intel's, AMD's and RISC-V's formats, for the others the fewest for
    /// `input_bits`.
    pub levels: u8,
    /// Bits of the addresses that devices use, for Arm's formats (64 - TnSZ) and DART. 0: 48, for DART 32.
    /// The other formats have as many as their levels say, and take 0.
    pub input_bits: u8,
    /// For the top of the address space (TTBR1), of Arm's first stage.
    pub upper: bool,
}

/// A table that exists.
pub(crate) struct Chosen {
    pub(crate) geometry: Geometry,
    pub(crate) sizes: PageSizes,
}

impl TableConfig {
    /// What it names.
    ///
    /// # Safety
    ///
    /// As [`text`] for the name.
    pub(crate) unsafe fn chosen(&self) -> Result<Chosen> {
        // SAFETY: the caller's promise.
        let name = unsafe { text(self.format, "config->format") }?;
        let given = |number: u8| (number != 0).then_some(number);
        let (levels, bits) = (given(self.levels), given(self.input_bits));
        let root = root(name, 0, levels, bits, self.upper)?;
        let geometry = Geometry::new(root.format, root.levels)?;
        let most = match self.max_leaf {
            0 => u64::MAX,
            most => most,
        };
        let sizes = geometry.page_sizes.up_to(most);
        if sizes.is_empty() {
            let least = geometry.page_sizes.smallest();
            let message =
                format!("{name} has no leaves below {least:#x} bytes; {most:#x} asked for");
            return Err(Failure::new(Status::Format, message));
        }
        Ok(Chosen { geometry, sizes })
    }
}

impl Chosen {
    pub(crate) const fn format(&self) -> FormatId {
        self.geometry.format
    }

    /// Bits of an address that all tables of the format can be at.
    pub(crate) const fn address_bits(&self) -> u32 {
        match self.geometry.format {
            FormatId::ArmV7s => <ArmV7s>::OUTPUT_BITS,
            FormatId::Dart(config) => match config.version {
                DartVersion::V1 => Dart1::OUTPUT_BITS,
                DartVersion::V2 => Dart2::OUTPUT_BITS,
            },
            _ => 48,
        }
    }

    /// Their number, which a format has at most 6 of.
    pub(crate) fn levels(&self) -> u8 {
        self.geometry.levels.len().try_into().unwrap_or(u8::MAX)
    }
}
