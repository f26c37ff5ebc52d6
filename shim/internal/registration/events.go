package registration

import (
	"strings"

	"github.com/samber/lo"
	"sigs.k8s.io/karpenter/pkg/events"
)

// CoreRecorder returns a recorder for core. It leaves out the events about Nodes that joined without
// the taint karpenter.sh/unregistered, one for each NodeClaim: the NodeClass names their node group
// instead ([Groups].ObserveTaint). It also leaves out that NodePools do not exist: packages outage and
// staticpool hide some from core, which would say so on each of their Nodes.
func CoreRecorder(recorder events.Recorder) events.Recorder { return coreRecorder{recorder} }

type coreRecorder struct{ events.Recorder }

// Publish implements [events.Recorder].
func (r coreRecorder) Publish(published ...events.Event) {
	r.Recorder.Publish(lo.Reject(published, func(e events.Event, _ int) bool {
		return e.Reason == events.UnregisteredTaintMissing || e.Reason == events.DisruptionBlocked && strings.Contains(e.Message, "NodePool not found")
	})...)
}
