//! Cases that hold for every format, one by one: what its functions say of entries, and what a table
//! does with each of its sizes. The random sequences go everywhere; these go where one can tell what
//! went wrong.

mod entries;
mod ranges;

use iopt::{Format, Gather, Table, TableOps as _};
use runs::PageSizes;

use super::Tables;
pub(crate) use entries::*;
pub(crate) use ranges::*;

/// The cases for one format.
macro_rules! cases {
    ($format:expr, $sizes:expr, $tables:ty; $($name:ident)*) => {$(
        #[test]
        fn $name() {
            $crate::suite::cases::$name::<_, $tables>($format, $sizes);
        }
    )*};
}

/// Levels with their sizes, of those that are offered.
fn offered<F: Format>(format: &F, sizes: PageSizes) -> Vec<(usize, u64)> {
    let levels = 0..usize::from(format.levels());
    levels
        .flat_map(|level| {
            let here = F::leaf_sizes(level).and(sizes);
            here.iter()
                .map(move |size| (level, size))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// The sizes that fit twice, into input and output addresses.
fn fitting<F: Format>(format: &F, sizes: PageSizes) -> Vec<(usize, u64)> {
    let first = format.aperture().spans().next().unwrap();
    let most = (first.len / 2).min(1 << (format.output_bits() - 1));
    let all = offered(format, sizes).into_iter();
    all.filter(|(_, size)| *size <= most).collect()
}

fn reclaim<F: Format, A: Tables>(table: &mut Table<F, &A>, mut gather: Gather) {
    let flushed = gather.flush_with(|_| Ok::<_, ()>(())).unwrap();
    table.reclaim(flushed);
}
