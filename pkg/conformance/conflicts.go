package conformance

import "github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"

// maxConflicts is how many consecutive races a call may lose.
const maxConflicts = 100

// repeat repeats the call at once after each lost race.
func repeat[T any](s *suite, call func() (T, error)) (T, error) {
	s.Helper()
	for conflicts := 0; ; conflicts++ {
		result, err := call()
		if !agenterrors.IsConflict(err) || conflicts == maxConflicts {
			return result, err
		}
	}
}
