-- What was written and never read: histograms of requests, and notes that nothing could add.
ALTER TABLE run DROP COLUMN digest;
DROP TABLE annotation;
