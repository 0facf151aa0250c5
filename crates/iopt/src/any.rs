//! Tables whose format is chosen at run time.
//!
//! The size of a table is a constant of its memory, so there is one enum for each size: an enum of
//! all formats would compile every format for every memory, and most of them could never be built.
//! ARMv7, with entries of 4 bytes, is alone in its kind: it is [`Table`] itself.

use runs::{PageSizes, SizeHistogram, Span};

use crate::arena::Storage;
use crate::engine::{Interruption, Leaf, Nodes, Planned, RunSink, Table};
use crate::error::{
    BrokenMemory, BuildError, DirtyError, MapError, ProtectError, RefitError, UnmapError,
};
use crate::format::{
    AmdV1, Aperture, ArmGranule, ArmStage1, ArmStage2, Dart1, Dart1Page4K, Dart2, DartVersion,
    Format, FormatId, K4, K4Lpa2, K16, K16Lpa2, K64, K64Lpa, RiscV, RiscVG, Root, VtdSs, X86_64,
};
use crate::gather::{Flushed, Gather, Invalidation};
use crate::memory::{Chain, TableMemory};
use crate::pending::Pending;
use crate::prot::Prot;
use crate::takeover::{AdoptError, Adopted, Takeover};

/// Runs an operation as a function of its own: what all formats do in one function takes minutes to
/// compile.
#[inline(never)]
fn apart<T>(operation: impl FnOnce() -> T) -> T {
    operation()
}

/// An enum of tables, a conversion from each of them, and the operations, each with one branch; and enums
/// of those that were adopted, and of maps that are planned.
///
/// The second part says how a format is built from its name: `id => format`, with the name's
/// configuration and the levels at hand.
macro_rules! any_table {
    (
        $(#[$doc:meta])* $any:ident, $adopted:ident, $planned:ident of 2^$log2:literal bytes {
            $($(#[$variant_doc:meta])* $name:ident($format:ty),)*
        }
        $levels:ident {
            $($id:pat $(if $guard:expr)? => $build:expr,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum $any<M: TableMemory> {
            $($(#[$variant_doc])* $name(Table<$format, M>),)*
        }

        $(
            impl<M: TableMemory> From<Table<$format, M>> for $any<M> {
                fn from(table: Table<$format, M>) -> Self {
                    Self::$name(table)
                }
            }
        )*

        impl<M: TableMemory> $any<M> {
            /// An empty table of `format` with `levels` levels, and leaves of the given sizes, as
            /// far as the format has them. See [`Table::with_page_sizes`]. The memory must have
            /// entries of 8 bytes, and tables that are not smaller than the format's.
            pub fn new(
                format: FormatId,
                levels: u8,
                sizes: PageSizes,
                memory: M,
            ) -> Result<Self, BuildError> {
                let $levels = levels;
                match format {
                    $($id $(if $guard)? => Self::build($build?, levels, sizes, memory),)*
                    _ => Err(BuildError::NotAny(format)),
                }
            }

            /// Takes the table that somebody has told a unit as `root`, whose leaves are to be of the
            /// given sizes from now on. See [`Takeover::adopt`]. A format with other options is
            /// adopted as such, opened as a [`Table`] and converted.
            pub fn adopt<S: Storage>(
                takeover: &mut Takeover<S, $log2>,
                root: Root,
                sizes: PageSizes,
            ) -> Result<$adopted, AdoptError> {
                let $levels = root.levels;
                match root.format {
                    $($id $(if $guard)? => {
                        let format = $build.map_err(AdoptError::Build)?;
                        Ok(adopt(takeover, format, root, sizes)?.into())
                    })*
                    format => Err(AdoptError::Build(BuildError::NotAny(format))),
                }
            }

            /// A table of a format that must have the levels asked for.
            fn build<F: Format>(
                format: F,
                levels: u8,
                sizes: PageSizes,
                memory: M,
            ) -> Result<Self, BuildError>
            where
                Self: From<Table<F, M>>,
            {
                if format.levels() != levels {
                    let format = format.id();
                    return Err(BuildError::Levels { format, levels });
                }
                Ok(Table::in_memory(format, memory, sizes)?.into())
            }

            any_table!(operations $any, $planned: $($name)*);
        }

        #[doc = concat!("What [`", stringify!($any), "::adopt`] has found whole.")]
        #[derive(Debug)]
        #[non_exhaustive]
        #[must_use = "its tables stay out of use until it is opened"]
        pub enum $adopted {
            $($(#[$variant_doc])* $name(Adopted<$format>),)*
        }

        $(
            impl From<Adopted<$format>> for $adopted {
                fn from(adopted: Adopted<$format>) -> Self {
                    Self::$name(adopted)
                }
            }
        )*

        #[doc = concat!("What [`", stringify!($any), "::plan_map`] has reserved the tables for.")]
        #[derive(Debug)]
        #[non_exhaustive]
        #[must_use = "nothing is mapped until it is filled"]
        pub enum $planned<'t, M: TableMemory> {
            $($(#[$variant_doc])* $name(Planned<'t, $format, M>),)*
        }

        impl<M: TableMemory> $planned<'_, M> {
            /// See [`Planned::fill`].
            pub fn fill(self) -> Result<(), MapError> {
                match self { $(Self::$name(planned) => apart(|| planned.fill()),)* }
            }
        }

        impl $adopted {
            /// See [`Adopted::open`].
            pub fn open<M: TableMemory>(self, memory: M) -> Result<$any<M>, AdoptError> {
                Ok(match self { $(Self::$name(adopted) => adopted.open(memory)?.into(),)* })
            }
        }
    };
    (operations $any:ident, $planned:ident: $($name:ident)*) => {
        /// See [`Table::root`].
        pub fn root(&self) -> Root {
            match self { $($any::$name(table) => table.root(),)* }
        }

        /// The addresses that it translates.
        pub fn aperture(&self) -> Aperture {
            match self { $($any::$name(table) => table.format().aperture(),)* }
        }

        /// See [`Table::intact`].
        pub fn intact(&self) -> Result<(), BrokenMemory> {
            match self { $($any::$name(table) => table.intact(),)* }
        }

        /// See [`Table::grow`].
        pub fn grow(&mut self, levels: u8, gather: &mut Gather) -> Result<Root, BuildError> {
            match self { $($any::$name(table) => apart(|| table.grow(levels, gather)),)* }
        }

        /// Where its tables lie.
        pub fn memory(&self) -> &M {
            match self { $($any::$name(table) => table.memory(),)* }
        }

        /// See [`Table::table_log2`].
        pub fn table_log2(&self, level: usize) -> Option<u32> {
            match self { $($any::$name(table) => table.table_log2(level),)* }
        }

        /// See [`Table::page_sizes`].
        pub fn page_sizes(&self) -> PageSizes {
            match self { $($any::$name(table) => table.page_sizes(),)* }
        }

        /// True when entries can say this: see [`Format::leaf_bits`].
        pub fn expresses(&self, prot: Prot) -> bool {
            match self { $($any::$name(table) => table.format().leaf_bits(prot).is_some(),)* }
        }

        /// See [`Table::tables`].
        pub fn tables(&self) -> u64 {
            match self { $($any::$name(table) => table.tables(),)* }
        }

        /// See [`Table::leaf_sizes`].
        pub fn leaf_sizes(&self) -> SizeHistogram {
            match self { $($any::$name(table) => apart(|| table.leaf_sizes()),)* }
        }

        /// See [`Table::map`].
        pub fn map(&mut self, iova: u64, runs: &[Span], prot: Prot) -> Result<(), MapError> {
            match self { $($any::$name(table) => apart(|| table.map(iova, runs, prot)),)* }
        }

        /// See [`Table::plan_map`].
        pub fn plan_map<'t>(
            &'t mut self,
            iova: u64,
            runs: &'t [Span],
            prot: Prot,
            spare: Option<&'t mut Chain>,
        ) -> Result<$planned<'t, M>, MapError> {
            match self {
                $($any::$name(table) => apart(|| table.plan_map(iova, runs, prot, spare)).map($planned::$name),)*
            }
        }

        /// See [`Table::unmap`].
        pub fn unmap(
            &mut self,
            range: Span,
            gather: &mut Gather,
            sink: &mut impl RunSink,
        ) -> Result<(), UnmapError> {
            match self { $($any::$name(table) => apart(|| table.unmap(range, gather, sink)),)* }
        }

        /// See [`Table::unmap_mapped`].
        pub fn unmap_mapped(
            &mut self,
            range: Span,
            gather: &mut Gather,
            sink: &mut impl RunSink,
        ) -> Result<u64, UnmapError> {
            match self { $($any::$name(table) => apart(|| table.unmap_mapped(range, gather, sink)),)* }
        }

        /// See [`Table::unmap_cutting`].
        pub fn unmap_cutting<E>(
            &mut self,
            range: Span,
            interruption: Interruption,
            gather: &mut Gather,
            sink: &mut impl RunSink,
            flush: impl FnMut(&Invalidation) -> Result<(), E>,
        ) -> Result<u64, RefitError<E>> {
            match self {
                $($any::$name(table) => {
                    apart(|| table.unmap_cutting(range, interruption, gather, sink, flush))
                })*
            }
        }

        /// See [`Table::split`].
        pub fn split<E>(
            &mut self,
            range: Span,
            size: u64,
            interruption: Interruption,
            gather: &mut Gather,
            flush: impl FnMut(&Invalidation) -> Result<(), E>,
        ) -> Result<(), RefitError<E>> {
            match self {
                $($any::$name(table) => apart(|| table.split(range, size, interruption, gather, flush)),)*
            }
        }

        /// See [`Table::cut`].
        pub fn cut<E>(
            &mut self,
            at: u64,
            interruption: Interruption,
            gather: &mut Gather,
            flush: impl FnMut(&Invalidation) -> Result<(), E>,
        ) -> Result<(), RefitError<E>> {
            match self {
                $($any::$name(table) => apart(|| table.cut(at, interruption, gather, flush)),)*
            }
        }

        /// See [`Table::merge`].
        pub fn merge<E>(
            &mut self,
            range: Span,
            interruption: Interruption,
            gather: &mut Gather,
            flush: impl FnMut(&Invalidation) -> Result<(), E>,
        ) -> Result<(), RefitError<E>> {
            match self {
                $($any::$name(table) => apart(|| table.merge(range, interruption, gather, flush)),)*
            }
        }

        /// See [`Table::protect`].
        pub fn protect(
            &mut self,
            range: Span,
            prot: Prot,
            gather: &mut Gather,
        ) -> Result<(), ProtectError> {
            match self { $($any::$name(table) => apart(|| table.protect(range, prot, gather)),)* }
        }

        /// See [`Table::track_dirty`].
        pub fn track_dirty(&mut self, on: bool) -> Result<(), DirtyError> {
            match self { $($any::$name(table) => table.track_dirty(on),)* }
        }

        /// See [`Table::harvest`].
        pub fn harvest<W: AsRef<[u64]> + AsMut<[u64]>>(
            &mut self,
            range: Span,
            pending: &mut Pending<W>,
        ) -> Result<u64, DirtyError> {
            match self { $($any::$name(table) => apart(|| table.harvest(range, pending)),)* }
        }

        /// See [`Table::peek_dirty`].
        pub fn peek_dirty(&self, range: Span, each: impl FnMut(Span)) -> Result<u64, DirtyError> {
            match self { $($any::$name(table) => apart(|| table.peek_dirty(range, each)),)* }
        }

        /// See [`Table::write_image`].
        pub fn write_image<E>(
            &self,
            sink: &mut impl FnMut(&[u8]) -> Result<(), E>,
        ) -> Result<u64, E> {
            match self { $($any::$name(table) => apart(|| table.write_image(sink)),)* }
        }

        /// See [`Table::nodes`].
        pub fn nodes(&self) -> Nodes {
            match self { $($any::$name(table) => apart(|| table.nodes()),)* }
        }

        /// See [`Table::translate`].
        pub fn translate(&self, iova: u64) -> Option<u64> {
            match self { $($any::$name(table) => table.translate(iova),)* }
        }

        /// See [`Table::leaf_at`].
        pub fn leaf_at(&self, iova: u64) -> Option<Leaf> {
            match self { $($any::$name(table) => table.leaf_at(iova),)* }
        }

        /// See [`Table::is_one_run`].
        pub fn is_one_run(&self, range: Span) -> bool {
            match self { $($any::$name(table) => apart(|| table.is_one_run(range)),)* }
        }

        /// Calls `each` for every leaf that maps at least one byte of `range`, in order. See
        /// [`Table::leaves`].
        pub fn for_each_leaf(&self, range: Span, mut each: impl FnMut(Leaf)) {
            match self { $($any::$name(table) => apart(|| table.leaves(range).for_each(&mut each)),)* };
        }

        /// See [`Table::reclaim`].
        pub fn reclaim(&mut self, flushed: Flushed) {
            match self { $($any::$name(table) => table.reclaim(flushed),)* };
        }

        /// See [`Table::tear_down`].
        pub fn tear_down(self) -> (Gather, M) {
            match self { $($any::$name(table) => apart(|| table.tear_down()),)* }
        }
    };
}

any_table! {
    /// A [`Table`] of any format with tables of 4 KiB: one branch per operation, whatever its size.
    ///
    /// [`new`](Self::new) builds it from what a [`Root`] says: the format's name with its
    /// configuration, and the levels. A format with other options is built as a [`Table`] and
    /// converted. It is the exclusive form.
    AnyTable, AnyAdopted, AnyPlanned of 2^12 bytes {
        /// AMD I/O page tables, version 1.
        AmdV1(AmdV1),
        /// The same with encrypted tables.
        AmdV1Encrypted(AmdV1<true>),
        /// x86-64: AMD version 2, VT-d first stage.
        X86_64(X86_64),
        /// The same with encrypted tables.
        X86_64Encrypted(X86_64<true>),
        /// VT-d second stage.
        VtdSs(VtdSs),
        /// Arm stage 1, 4 KiB.
        ArmStage1K4(ArmStage1<K4>),
        /// Arm stage 1, 4 KiB with LPA2.
        ArmStage1K4Lpa2(ArmStage1<K4Lpa2>),
        /// Arm stage 2, 4 KiB.
        ArmStage2K4(ArmStage2<K4>),
        /// Arm stage 2, 4 KiB with LPA2.
        ArmStage2K4Lpa2(ArmStage2<K4Lpa2>),
        /// RISC-V, first stage.
        RiscV(RiscV),
        /// RISC-V, second stage.
        RiscVG(RiscVG),
        /// Apple DART, version 1, with pages of 4 KiB.
        Dart1Page4K(Dart1Page4K),
    }
    levels {
        FormatId::AmdV1 => AmdV1::new(levels),
        FormatId::X86_64 => X86_64::new(levels),
        FormatId::VtdSs => VtdSs::new(levels),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K4 => ArmStage1::<K4>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K4Lpa2 => ArmStage1::<K4Lpa2>::of(arm),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K4 => ArmStage2::<K4>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K4Lpa2 => {
            ArmStage2::<K4Lpa2>::of(arm, levels)
        },
        FormatId::RiscV => RiscV::new(levels),
        FormatId::RiscVG => RiscVG::new(levels),
        FormatId::Dart(dart) if dart.version == DartVersion::V1 && dart.page_log2 == 12 => {
            Dart1Page4K::new(levels, dart.input_bits)
        },
    }
}

any_table! {
    /// A [`Table`] of any format with tables of 16 KiB, otherwise as [`AnyTable`].
    AnyTable16K, AnyAdopted16K, AnyPlanned16K of 2^14 bytes {
        /// Arm stage 1, 16 KiB.
        ArmStage1K16(ArmStage1<K16>),
        /// Arm stage 1, 16 KiB with LPA2.
        ArmStage1K16Lpa2(ArmStage1<K16Lpa2>),
        /// Arm stage 2, 16 KiB.
        ArmStage2K16(ArmStage2<K16>),
        /// Arm stage 2, 16 KiB with LPA2.
        ArmStage2K16Lpa2(ArmStage2<K16Lpa2>),
        /// Apple DART, version 1.
        Dart1(Dart1),
        /// Apple DART, version 2.
        Dart2(Dart2),
    }
    levels {
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K16 => ArmStage1::<K16>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K16Lpa2 => ArmStage1::<K16Lpa2>::of(arm),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K16 => ArmStage2::<K16>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K16Lpa2 => {
            ArmStage2::<K16Lpa2>::of(arm, levels)
        },
        FormatId::Dart(dart) if dart.version == DartVersion::V1 && dart.page_log2 == 14 => {
            Dart1::new(levels, dart.input_bits)
        },
        FormatId::Dart(dart) if dart.version == DartVersion::V2 && dart.page_log2 == 14 => {
            Dart2::new(levels, dart.input_bits)
        },
    }
}

any_table! {
    /// A [`Table`] of any format with tables of 64 KiB, otherwise as [`AnyTable`].
    AnyTable64K, AnyAdopted64K, AnyPlanned64K of 2^16 bytes {
        /// Arm stage 1, 64 KiB.
        ArmStage1K64(ArmStage1<K64>),
        /// Arm stage 1, 64 KiB with LPA.
        ArmStage1K64Lpa(ArmStage1<K64Lpa>),
        /// Arm stage 2, 64 KiB.
        ArmStage2K64(ArmStage2<K64>),
        /// Arm stage 2, 64 KiB with LPA.
        ArmStage2K64Lpa(ArmStage2<K64Lpa>),
    }
    levels {
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K64 => ArmStage1::<K64>::of(arm),
        FormatId::ArmStage1(arm) if arm.granule == ArmGranule::K64Lpa => ArmStage1::<K64Lpa>::of(arm),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K64 => ArmStage2::<K64>::of(arm, levels),
        FormatId::ArmStage2(arm) if arm.granule == ArmGranule::K64Lpa => {
            ArmStage2::<K64Lpa>::of(arm, levels)
        },
    }
}

/// The table of a format that must have the root's levels.
fn adopt<F: Format, S: Storage, const LOG2: u32>(
    takeover: &mut Takeover<S, LOG2>,
    format: F,
    root: Root,
    sizes: PageSizes,
) -> Result<Adopted<F>, AdoptError> {
    if format.levels() != root.levels {
        let (format, levels) = (root.format, root.levels);
        return Err(AdoptError::Build(BuildError::Levels { format, levels }));
    }
    takeover.adopt(format, root.address, sizes)
}
