package conformance

import "github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"

// maxConflicts is how often a call may lose a race in a row.
const maxConflicts = 100

// repeat calls again at once after a lost race.
func repeat[T any](s *suite, call func() (T, error)) (T, error) {
	s.Helper()
	for conflicts := 0; ; conflicts++ {
		result, err := call()
		if !agenterrors.IsConflict(err) || conflicts == maxConflicts {
			return result, err
		}
	}
}
