//! What the allocator tells about the memory of this process.

use std::ffi::{CStr, c_char, c_void};

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
