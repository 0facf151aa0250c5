//! Levels, as constants where most work is.

/// A level; 0 is that of the smallest page. Passes that decide about speed are compiled for each type of it: by [`L`] for
/// levels 0 and 1, where nearly all entries are, so that shifts, table sizes and sizes of leaves are constants, and once by
/// [`Upper`] for all above.
pub(crate) trait Level: Copy {
    /// It is a constant.
    const LOW: bool;

    fn n(self) -> usize;

    #[inline(always)]
    fn is_low(self) -> bool {
        Self::LOW
    }
}

/// A level that is a constant.
#[derive(Clone, Copy)]
pub(crate) struct L<const N: usize>;

impl<const N: usize> Level for L<N> {
    const LOW: bool = true;

    #[inline(always)]
    fn n(self) -> usize {
        N
    }
}

/// A level from 2 on.
#[derive(Clone, Copy)]
pub(crate) struct Upper(pub(crate) usize);

impl Level for Upper {
    const LOW: bool = false;

    #[inline(always)]
    fn n(self) -> usize {
        self.0
    }
}

/// Does `$body` with `$v` as the [`Level`] that the number `$level` says.
macro_rules! at_level {
    ($level:expr, $v:ident => $body:expr) => {
        match $level {
            0 => {
                let $v = $crate::engine::L::<0>;
                $body
            }
            1 => {
                let $v = $crate::engine::L::<1>;
                $body
            }
            upper => {
                let $v = $crate::engine::Upper(upper);
                $body
            }
        }
    };
}
pub(crate) use at_level;

/// Does `$body` with `$v` as the level below that of the value `$above`. A table at level 0 has none below, and what is
/// said of one there is never done.
macro_rules! below {
    ($above:ident, $v:ident => $body:expr) => {
        $crate::engine::at_level!($above.n().saturating_sub(1), $v => $body)
    };
}
pub(crate) use below;
