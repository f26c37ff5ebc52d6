package spokes

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

const (
	// reportInterval is the minimum interval between writes of what a shim reports about NodePools,
	// for reports of up to reportBytes. It grows with their size: etcd keeps each version of a
	// Spoke for minutes, and a report may have 256 KiB.
	reportInterval = 10 * time.Second
	reportBytes    = 8 << 10
)

// Report is what a shim reports about its spoke's NodePools.
type Report struct {
	// NodePools are the first of them, and MoreNodePools the number of the others.
	NodePools     []v1alpha1.SpokeNodePool
	MoreNodePools int32
	// Published is what became of published objects.
	Published []v1alpha1.SpokePublished
}

// interval returns how long the next report has to wait after this one.
func (r Report) interval() time.Duration {
	encoded, err := json.Marshal(v1alpha1.SpokeStatus{NodePools: r.NodePools, MoreNodePools: r.MoreNodePools, Published: r.Published})
	if err != nil {
		return reportInterval // it cannot be written either
	}
	return time.Duration(max(1, (len(encoded)+reportBytes-1)/reportBytes)) * reportInterval
}

// reported is the last report of a shim that was written, and the time from which the next may be.
type reported struct {
	report   Report
	at, next time.Time
}

// TooSoonError means that the last change was reported a moment ago. Nothing was written.
type TooSoonError struct{ RetryAfter time.Duration }

func (e *TooSoonError) Error() string {
	return fmt.Sprintf("the last change was reported a moment ago; the next is accepted in %s", e.RetryAfter)
}

// Report records in a Cluster's Spoke what its shim reports about NodePools. It writes only
// changes, and fails with [*TooSoonError] if they come too fast.
func (s *Spokes) Report(ctx context.Context, cluster *clusterv1.Cluster, report Report) error {
	key := client.ObjectKeyFromObject(cluster)
	due, err := s.reportDue(key, report)
	if !due || err != nil {
		return err
	}
	err = s.writeReport(ctx, cluster, report)
	if err != nil {
		s.mu.Lock()
		delete(s.reports, key)
		s.mu.Unlock()
	}
	return err
}

// reportDue reports whether a report is to be written, and records it as written.
func (s *Spokes) reportDue(key types.NamespacedName, report Report) (bool, error) {
	now, interval := s.Clock.Now(), report.interval()
	s.mu.Lock()
	defer s.mu.Unlock()
	last, known := s.reports[key]
	same := known && equality.Semantic.DeepEqual(last.report, report)
	switch age := now.Sub(last.at); {
	case same && age < noteInterval:
		return false, nil
	case known && !same && now.Before(last.next):
		return false, &TooSoonError{RetryAfter: last.next.Sub(now)}
	}
	s.reports[key] = reported{report, now, now.Add(interval)}
	return true, nil
}

func (s *Spokes) writeReport(ctx context.Context, cluster *clusterv1.Cluster, report Report) error {
	began := s.Clock.Now()
	spoke := &v1alpha1.Spoke{}
	if err := s.read(ctx, client.ObjectKeyFromObject(cluster), spoke); err != nil {
		return err
	}
	if err := s.keepOwned(ctx, cluster, spoke); err != nil {
		return err
	}
	before := spoke.DeepCopy()
	spoke.Status.NodePools, spoke.Status.MoreNodePools, spoke.Status.Published = report.NodePools, report.MoreNodePools, report.Published
	if equality.Semantic.DeepEqual(before.Status, spoke.Status) {
		return nil
	}
	if err := s.Client.Status().Patch(ctx, spoke, client.MergeFrom(before)); err != nil {
		return fmt.Errorf("writing the Spoke's status: %w", err)
	}
	s.wrote(spoke, began)
	return nil
}
