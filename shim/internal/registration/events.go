package registration

import (
	"github.com/samber/lo"
	"sigs.k8s.io/karpenter/pkg/events"
)

// CoreRecorder returns a recorder for core. It leaves out the events about Nodes that joined without
// the taint karpenter.sh/unregistered, one for each NodeClaim: the NodeClass names their node group
// instead ([Groups].ObserveTaint).
func CoreRecorder(recorder events.Recorder) events.Recorder { return coreRecorder{recorder} }

type coreRecorder struct{ events.Recorder }

// Publish implements [events.Recorder].
func (r coreRecorder) Publish(published ...events.Event) {
	r.Recorder.Publish(lo.Reject(published, func(e events.Event, _ int) bool { return e.Reason == events.UnregisteredTaintMissing })...)
}
