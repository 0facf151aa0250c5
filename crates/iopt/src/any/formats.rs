//! Which format is meant: from its name, its configuration and its levels to its type.

use core::fmt;
use core::sync::atomic::{AtomicU32, AtomicU64};

use runs::PageSizes;

use super::{AnyAdopted, AnyTable};
use crate::arena::Storage;
use crate::arena::erased::Erased;
use crate::cell::Cell;
use crate::engine::Table;
use crate::error::BuildError;
use crate::format::{
    AmdV1, ArmGranule, ArmStage1, ArmStage2, ArmV7s, BreakBeforeMake, Dart1, Dart1Page4K, Dart2,
    DartVersion, Format, FormatId, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa, RiscV, RiscVG, Root,
    VtdSs, X86_64,
};
use crate::memory::TableMemory;
use crate::takeover::{AdoptError, Adopted, Takeover};
use crate::wide::WideCell;

/// The cell of memory that an [`AnyTable`] can have.
///
/// Tables are compiled for one cell of each width, and take any other for that one.
pub trait AnyCell: Cell + Send + Sync + fmt::Debug + Sized + 'static {
    /// The cell for which they are compiled.
    #[doc(hidden)]
    type One: ByWidth;

    /// The same cells, as that one.
    #[doc(hidden)]
    fn one(cells: &[Self]) -> &[Self::One];

    /// The reverse.
    #[doc(hidden)]
    fn own(cells: &[Self::One]) -> &[Self];
}

impl AnyCell for AtomicU64 {
    type One = WideCell;

    fn one(cells: &[Self]) -> &[WideCell] {
        WideCell::over(cells)
    }

    fn own(cells: &[WideCell]) -> &[Self] {
        WideCell::narrow(cells)
    }
}

/// The width of entries decides which formats there can be.
pub trait ByWidth: Cell + Send + Sync + fmt::Debug + Sized + 'static {
    /// The other width.
    type Other: ByWidth;

    /// Hands the format with this name and these levels to `visitor`.
    fn with_format<V: Visitor>(
        format: FormatId,
        levels: u8,
        visitor: V,
    ) -> Result<V::Result, BuildError>;

    /// The same, and the error of memory with tables of `table_bytes` bytes if the format has entries of
    /// another width.
    fn with_fitting<V: Visitor>(
        format: FormatId,
        levels: u8,
        table_bytes: u64,
        visitor: V,
    ) -> Result<V::Result, BuildError> {
        let offered = (Self::BYTES, table_bytes);
        let found = Self::with_format(format, levels, visitor);
        found.map_err(
            |cause| match Self::Other::with_format(format, levels, Geometry) {
                Ok(wanted) => BuildError::TableMemory {
                    format,
                    wanted,
                    offered,
                },
                Err(_) => cause,
            },
        )
    }

    /// [`AnyTable::demanding`], without a parameter: so it is compiled here.
    fn build(
        format: FormatId,
        levels: u8,
        sizes: PageSizes,
        demand: BreakBeforeMake,
        memory: Erased<Self>,
    ) -> Result<AnyTable, BuildError>;

    /// [`AnyAdopted::open`], without a parameter.
    fn open(adopted: Adopted<(FormatId, u8)>, memory: Erased<Self>)
    -> Result<AnyTable, AdoptError>;
}

/// Operation on a format that is known by its name.
pub trait Visitor {
    /// Result of the operation.
    type Result;

    /// Does it.
    fn visit<F: Format>(self, format: F) -> Self::Result;
}

macro_rules! any_cell {
    ($cell:ty, $other:ty, $levels:ident { $($id:pat $(if $guard:expr)? => $format:expr,)* }) => {
        impl AnyCell for $cell {
            type One = Self;

            fn one(cells: &[Self]) -> &[Self] {
                cells
            }

            fn own(cells: &[Self]) -> &[Self] {
                cells
            }
        }

        impl ByWidth for $cell {
            type Other = $other;

            fn with_format<V: Visitor>(
                format: FormatId,
                $levels: u8,
                visitor: V,
            ) -> Result<V::Result, BuildError> {
                match format {
                    $($id $(if $guard)? => visit($format?, $levels, visitor),)*
                    _ => Err(BuildError::NotAny(format)),
                }
            }

            fn build(
                format: FormatId,
                levels: u8,
                sizes: PageSizes,
                demand: BreakBeforeMake,
                memory: Erased<Self>,
            ) -> Result<AnyTable, BuildError> {
                let table_bytes = memory.table_bytes();
                let build = Build {
                    sizes,
                    demand,
                    memory,
                };
                Self::with_fitting(format, levels, table_bytes, build)?
            }

            fn open(
                adopted: Adopted<(FormatId, u8)>,
                memory: Erased<Self>,
            ) -> Result<AnyTable, AdoptError> {
                let (format, levels) = *adopted.format();
                let open = Open { adopted, memory };
                Self::with_format(format, levels, open).map_err(AdoptError::Build)?
            }
        }
    };
}

any_cell! {
    WideCell, AtomicU32, levels {
        FormatId::AmdV1 => AmdV1::new(levels),
        FormatId::X86_64 => X86_64::new(levels),
        FormatId::VtdSs => VtdSs::new(levels),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K4 => ArmStage1::<K4>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K4Lpa2 => ArmStage1::<K4Lpa2>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K16 => ArmStage1::<K16>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K16Lpa2 => ArmStage1::<K16Lpa2>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K64 => ArmStage1::<K64>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K64Lpa => ArmStage1::<K64Lpa>::of(arm),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K4 => ArmStage2::<K4>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K4Lpa2 => {
            ArmStage2::<K4Lpa2>::of(arm, levels)
        },
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K16 => ArmStage2::<K16>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K16Lpa2 => {
            ArmStage2::<K16Lpa2>::of(arm, levels)
        },
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K64 => ArmStage2::<K64>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K64Lpa => {
            ArmStage2::<K64Lpa>::of(arm, levels)
        },
        FormatId::RiscV => RiscV::new(levels),
        FormatId::RiscVG => RiscVG::new(levels),
        FormatId::Dart(dart) if dart.version == DartVersion::V1 && dart.page_log2 == 12 => {
            Dart1Page4K::new(levels, dart.input_bits)
        },
        FormatId::Dart(dart) if dart.version == DartVersion::V1 && dart.page_log2 == 14 => {
            Dart1::new(levels, dart.input_bits)
        },
        FormatId::Dart(dart) if dart.version == DartVersion::V2 && dart.page_log2 == 14 => {
            Dart2::new(levels, dart.input_bits)
        },
    }
}

any_cell! {
    AtomicU32, WideCell, levels {
        FormatId::ArmV7s => Ok::<_, BuildError>(<ArmV7s>::new()),
    }
}

/// Hands over a format that must have the levels asked for.
fn visit<F: Format, V: Visitor>(
    format: F,
    levels: u8,
    visitor: V,
) -> Result<V::Result, BuildError> {
    if format.levels() != levels {
        let format = format.id();
        return Err(BuildError::Levels { format, levels });
    }
    Ok(visitor.visit(format))
}

/// Says how many bytes an entry and a table have.
struct Geometry;

impl Visitor for Geometry {
    type Result = (usize, u64);

    fn visit<F: Format>(self, _format: F) -> (usize, u64) {
        (F::ENTRY_BYTES, F::TABLE_BYTES)
    }
}

struct Build<C> {
    sizes: PageSizes,
    demand: BreakBeforeMake,
    memory: Erased<C>,
}

impl<C: ByWidth> Visitor for Build<C> {
    type Result = Result<AnyTable, BuildError>;

    fn visit<F: Format>(self, format: F) -> Self::Result {
        let format = format.demanding(self.demand);
        Table::in_memory(format, self.memory, self.sizes).map(AnyTable::over)
    }
}

pub(super) struct Adopt<'t, S: Storage, const TABLE_LOG2: u32> {
    pub(super) takeover: &'t mut Takeover<S, TABLE_LOG2>,
    pub(super) root: Root,
    pub(super) sizes: PageSizes,
}

impl<S: Storage, const TABLE_LOG2: u32> Visitor for Adopt<'_, S, TABLE_LOG2> {
    type Result = Result<AnyAdopted, AdoptError>;

    fn visit<F: Format>(self, format: F) -> Self::Result {
        let Self {
            takeover,
            root,
            sizes,
        } = self;
        let adopted = takeover.adopt_fitting(format, root.address, sizes)?;
        Ok(AnyAdopted(adopted.with_format((root.format, root.levels))))
    }
}

struct Open<C> {
    adopted: Adopted<(FormatId, u8)>,
    memory: Erased<C>,
}

impl<C: ByWidth> Visitor for Open<C> {
    type Result = Result<AnyTable, AdoptError>;

    fn visit<F: Format>(self, format: F) -> Self::Result {
        let adopted = self.adopted.with_format(format);
        adopted.open(self.memory).map(AnyTable::over)
    }
}
