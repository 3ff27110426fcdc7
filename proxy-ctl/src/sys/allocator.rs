//! The allocator of this process: observed, and asked what it knows.

use std::{
    alloc::{GlobalAlloc, Layout},
    ffi::{CStr, c_char, c_void},
    marker::PhantomData,
};

/// Is told of every allocation, by the thread that makes it. None of this may allocate, wait or panic.
pub trait Observer {
    /// Asked first, each time: as little as possible.
    fn is_on() -> bool;
    fn allocated(address: usize, size: usize);
    /// Before the address can be given to anybody else. A block whose size is changed is freed and allocated anew, and
    /// only freed if there is no memory for that.
    fn freed(address: usize);
}

/// An allocator that is watched.
#[derive(Debug)]
pub struct Observed<A, O> {
    allocator: A,
    observer: PhantomData<O>,
}

impl<A, O> Observed<A, O> {
    pub const fn new(allocator: A) -> Self {
        Self { allocator, observer: PhantomData }
    }
}

/// What is done while the observer is on.
impl<A: GlobalAlloc, O: Observer> Observed<A, O> {
    fn told(address: *mut u8, size: usize) -> *mut u8 {
        if !address.is_null() {
            O::allocated(address.addr(), size);
        }
        address
    }

    /// # Safety
    /// As of `GlobalAlloc::alloc`.
    #[cold]
    unsafe fn alloc_told(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        Self::told(unsafe { self.allocator.alloc(layout) }, layout.size())
    }

    /// # Safety
    /// As of `GlobalAlloc::alloc_zeroed`.
    #[cold]
    unsafe fn alloc_zeroed_told(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        Self::told(unsafe { self.allocator.alloc_zeroed(layout) }, layout.size())
    }

    /// # Safety
    /// As of `GlobalAlloc::dealloc`.
    #[cold]
    unsafe fn dealloc_told(&self, address: *mut u8, layout: Layout) {
        O::freed(address.addr());
        // SAFETY: the caller's promise.
        unsafe { self.allocator.dealloc(address, layout) };
    }

    /// # Safety
    /// As of `GlobalAlloc::realloc`.
    #[cold]
    unsafe fn realloc_told(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        O::freed(address.addr());
        // SAFETY: the caller's promise.
        Self::told(unsafe { self.allocator.realloc(address, layout, size) }, size)
    }
}

// SAFETY: all is done by the inner allocator, with the arguments as they came. The observer is asked first, so that nothing
// is left to do here after the inner allocator's call.
unsafe impl<A: GlobalAlloc, O: Observer> GlobalAlloc for Observed<A, O> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if O::is_on() {
            // SAFETY: the caller's promise.
            return unsafe { self.alloc_told(layout) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.allocator.alloc(layout) }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if O::is_on() {
            // SAFETY: the caller's promise.
            return unsafe { self.alloc_zeroed_told(layout) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.allocator.alloc_zeroed(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        if O::is_on() {
            // SAFETY: the caller's promise.
            return unsafe { self.dealloc_told(address, layout) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.allocator.dealloc(address, layout) };
    }

    #[inline]
    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if O::is_on() {
            // SAFETY: the caller's promise.
            return unsafe { self.realloc_told(address, layout, size) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.allocator.realloc(address, layout, size) }
    }
}

/// The allocator's own report, for people: what is reserved, committed, and was at most. Lines end with a newline.
pub fn report() -> String {
    let mut text = String::new();
    let target: *mut String = &mut text;
    // SAFETY: `append` gets `target` back, which outlives the call, and which nothing else uses meanwhile.
    unsafe { libmimalloc_sys::mi_stats_print_out(Some(append), target.cast()) };
    text
}

/// # Safety
/// `message` is null or text that ends with a zero byte; `target` is a `String` that nobody else uses.
unsafe extern "C" fn append(message: *const c_char, target: *mut c_void) {
    if message.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let message = unsafe { CStr::from_ptr(message) };
    // SAFETY: the caller's promise.
    let Some(text) = (unsafe { target.cast::<String>().as_mut() }) else { return };
    text.push_str(&message.to_string_lossy());
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_report_is_lines_of_text() {
        // The tests' allocator is another one: how much there is to tell is another matter.
        let report = super::report();
        assert!(report.trim().len() > 3 && report.ends_with('\n'), "{report:?}");
    }
}
