//go:build race

package claims

// raced is whether the race detector watches the tests.
const raced = true
